"""Checkpoints that are either complete and verified, or do not count.

`manager` saves and restores, `manifest` is the on-disk format (no jax), `integrity` the fingerprints, `inspect` the
`maxtext checkpoint` verb.
"""
