"""Benchmarks: `python -m benchmarks` runs all of them. Ratios are measured side by side in one run."""
