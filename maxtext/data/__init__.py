"""Text to token files (`maxtext data prepare`), and token files to the global batches of a run.

Read `tokens.py` (what the data are), `order.py` (which instance belongs to which step), `pipeline.py` (the iterator).
"""


class DataError(ValueError):
    """Text, token files or a data setting that cannot be used; the message names the file and the place in it."""
