"""Bookkeeping of cached prefixes: see README.md. Numpy and the standard library only."""
