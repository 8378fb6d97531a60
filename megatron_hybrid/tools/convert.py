"""`megatron-hybrid convert`: between folders of Hugging Face, of Megatron-LM and of ours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid.checkpoints.checkpoint import (
    CONFIG_FILE,
    CheckpointError,
    read_config,
    save_checkpoint,
    save_huggingface,
)
from megatron_hybrid.checkpoints.megatron.torch_dist import (
    is_torch_dist,
    load_megatron,
    save_megatron,
)
from megatron_hybrid.checkpoints.pretrained import load_pretrained, load_tokenizer

_SAVE = {"ours": save_checkpoint, "huggingface": save_huggingface, "torch_dist": save_megatron}


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    to: str,
    dtype: str | None = None,
    huggingface_config: str | os.PathLike | None = None,
) -> None:
    """Load a folder of any kind and write it as `to`, with its tokenizer.

    Args:
        source: a checkpoint of ours, a model folder of Hugging Face, or one of Megatron-LM
            (torch_dist).
        target: a folder that does not exist, or is empty.
        to: "ours", "huggingface" or "torch_dist".
        dtype: name of a torch dtype; None: that of the source.
        huggingface_config: for a source of Megatron-LM, the Hugging Face folder of the same
            architecture, or its config.json: gives what Megatron does not save, the tokenizer
            and the size of the vocabulary without padding, and makes "huggingface" possible.

    Raises:
        CheckpointError: the source cannot be read or is not of that architecture, the target is not
            free, or its kind cannot hold the model.
    """
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty. Name a folder that does not exist yet.")
    options = {"device": "cpu", "dtype": None if dtype is None else getattr(torch, dtype)}
    if is_torch_dist(source):
        model, tokenizer = _load_torch_dist(source, huggingface_config, options)
    elif huggingface_config is not None:
        raise CheckpointError(
            f"{source} is no folder of Megatron-LM, so a Hugging Face config beside it would "
            f"contradict its own. Leave out {huggingface_config}."
        )
    else:
        model, tokenizer = load_pretrained(source, **options)
    _SAVE[to](model, folder)
    if tokenizer is not None:
        tokenizer.save(folder)


def _load_torch_dist(
    source: str | os.PathLike,
    huggingface_config: str | os.PathLike | None,
    options: dict[str, Any],
):
    """A model of Megatron-LM; the tokenizer of the Hugging Face folder."""
    if huggingface_config is None:
        return load_megatron(source, **options), None
    path = Path(huggingface_config)
    folder = path.parent if path.name == CONFIG_FILE else path
    theirs = read_config(folder)
    if theirs.huggingface_config is None:
        raise CheckpointError(f"{folder / CONFIG_FILE} is not one of Hugging Face.")
    model = load_megatron(
        source,
        vocab_size=theirs.vocab_size,
        huggingface_config=theirs.huggingface_config,
        **options,
    )
    for name in model.config.differences(theirs):
        raise CheckpointError(
            f"{source} has {name}={getattr(model.config, name)!r}, but {folder / CONFIG_FILE} says "
            f"{getattr(theirs, name)!r}. They are of different models."
        )
    return model, load_tokenizer(folder, theirs.vocab_size)
