"""Many small runs at once: a grid of settings and seeds, trained as one program where they differ in numbers alone."""
