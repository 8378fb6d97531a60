"""Benchmarks for a GPU, beside its rooflines and other libraries: `python -m benchmarks.gpu`.

Without a CUDA device, or with `--toy`, all runs on the CPU at toy size, to show that it runs.
"""
