"""The configuration of a model: groups of fields by purpose, combined by `hybrid_config.py`.

A group has fields, their docstrings, derived defaults, and `check`. The layer pattern names the
groups that a layer kind reads.
"""
