"""Bookkeeping of cached prefixes: see docs/how/cache.md. Numpy and the standard library only."""
