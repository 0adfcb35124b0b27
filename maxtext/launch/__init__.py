"""Runs as jobs of engines that others keep: Ray Train, Kubernetes JobSets and Pathways on GKE, SLURM.

Nothing here schedules, restarts or joins processes: an engine starts `maxtext train` in each process, and the run
continues by itself from its newest checkpoint when the engine starts it again.
"""
