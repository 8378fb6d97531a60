"""Checks and benchmarks for a GPU, against its rooflines: see `first_run`."""
