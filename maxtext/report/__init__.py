"""The report of a run, made from the files of its directory."""
