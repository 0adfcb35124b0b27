"""Looking at runs from outside, through the files of their directories alone: `maxtext watch` and `maxtext runs`."""
