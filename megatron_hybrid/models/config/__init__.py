"""The configuration of a model: one file per group of fields, put together by `hybrid_config.py`.

A group holds fields, their docstrings, the defaults that follow from other fields, and `check`. The
layer pattern names the groups that a layer kind reads.
"""
