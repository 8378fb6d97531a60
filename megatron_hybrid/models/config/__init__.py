"""The configuration of a model: one file per group of fields, combined by `hybrid_config.py`.

A group has fields, their docstrings, derived defaults, and `check`. The layer pattern names the
groups that a layer kind reads.
"""
