"""Questions about caches of hybrid models, each answered by a run of a minute or two on a CPU:
`python -m benchmarks.questions NAME`."""
