"""`megatron-hybrid convert`: between Hugging Face's model folders and ours."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_hybrid.checkpoints.checkpoint import (
    CheckpointError,
    save_checkpoint,
    save_huggingface,
)
from megatron_hybrid.checkpoints.pretrained import load_pretrained


def convert(
    source: str | os.PathLike, target: str | os.PathLike, to: str, dtype: str | None = None
) -> None:
    """Load a folder of either kind and write it as `to`, with its tokenizer.

    Args:
        target: a folder that does not exist, or is empty.
        to: "megatron" (a checkpoint of ours) or "huggingface".
        dtype: name of a torch dtype; None: that of the source.

    Raises:
        CheckpointError: the source cannot be read, or the target is not free.
    """
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty. Name a folder that does not exist yet.")
    model, tokenizer = load_pretrained(
        source, device="cpu", dtype=None if dtype is None else getattr(torch, dtype)
    )
    save = save_huggingface if to == "huggingface" else save_checkpoint
    save(model, folder)
    if tokenizer is not None:
        tokenizer.save(folder)
