"""The drawings of the docs: `python -m benchmarks.drawings` writes them into docs/drawings."""
