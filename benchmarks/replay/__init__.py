"""Request traces through prefix caches, without a model: `python -m benchmarks.replay`."""
