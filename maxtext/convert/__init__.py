"""Weights in and out: tables that map other formats' tensors onto our arrays, and the proof that nothing was lost."""


class ConvertError(ValueError):
    """A checkpoint cannot be converted; the message names every tensor or setting at fault and what to do."""
