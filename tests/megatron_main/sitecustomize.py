"""Lets Megatron-LM's main start on Python 3.11, where PYTHONPATH has this folder."""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
