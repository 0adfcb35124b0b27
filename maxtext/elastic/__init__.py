"""Elastic training: a supervisor, workers that leave and join in process, and the files that they meet in."""
