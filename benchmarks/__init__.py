"""`python -m benchmarks` runs all of them; ratios are measured side by side in one run."""
