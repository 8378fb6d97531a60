"""Checks and benchmarks for a GPU, beside its rooflines and other libraries: see `first_run`."""
