"""`megatron-hybrid convert`: between folders of Hugging Face, of Megatron-LM and of ours."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from megatron_hybrid.checkpoints.checkpoint import (
    CheckpointError,
    read_config,
    save_checkpoint,
    save_huggingface,
)
from megatron_hybrid.checkpoints.folder import CONFIG_FILE, check_free, is_torch_dist
from megatron_hybrid.checkpoints.megatron.args import megatron_form
from megatron_hybrid.checkpoints.megatron.torch_dist import (
    DistributedTensors,
    load_megatron,
    save_megatron,
)
from megatron_hybrid.checkpoints.pretrained import load_pretrained, load_tokenizer, model_folder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.validation import check_field

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
        source: a checkpoint of ours, a model folder of Hugging Face or of Megatron-LM (torch_dist),
            or the folder of a training run or of a checkpoint in it.
        target: a folder that does not exist, or is empty.
        to: "ours", "huggingface" or "torch_dist".
        dtype: name of a torch dtype; None keeps that of the source.
        huggingface_config: for weights that do not come from Hugging Face, the folder of a model of
            the same architecture there, or its config.json. It makes "huggingface" possible, and
            gives what Megatron does not save: the tokenizer, and the size of the vocabulary without
            padding.

    Raises:
        CheckpointError: the source cannot be read or is not of that architecture, the target is not
            free, or its kind cannot hold the model.
        ValueError: `to` has another value.
    """
    check_field("to", to, Literal[tuple(_SAVE)])
    folder = Path(target)
    check_free(folder)
    options = {"device": "cpu", "dtype": None if dtype is None else getattr(torch, dtype)}
    load = _load_torch_dist if is_torch_dist(source) else partial(load_pretrained, mtp=True)
    if huggingface_config is None:
        model, tokenizer = load(source, **options)
    else:
        model, tokenizer = _load_as(load, source, Path(huggingface_config), options)
    _SAVE[to](model, folder)
    if tokenizer is not None:
        tokenizer.save(folder)


def _load_torch_dist(
    source: str | os.PathLike, **options: Any
) -> tuple[HybridModel, Tokenizer | None]:
    """Load a model of Megatron-LM, or of a training run here, whose recipe names a tokenizer."""
    model = load_megatron(source, **options)
    folder = _tokenizer_of_run(Path(source))
    return model, folder and load_tokenizer(folder, model.config.vocab_size)


def _tokenizer_of_run(source: Path) -> Path | None:
    """Return the folder of the tokenizer of a training run, or of a checkpoint in its folder."""
    for recipe in (source / "recipe.yaml", source.parent / "recipe.yaml"):
        if recipe.is_file():
            try:
                return model_folder(yaml.safe_load(recipe.read_text(encoding="utf-8"))["tokenizer"])
            except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{recipe} is not the recipe of a run: {error!r}") from error
    return None


def _load_as(
    load: Callable[..., tuple[HybridModel, Tokenizer | None]],
    source: str | os.PathLike,
    path: Path,
    options: dict[str, Any],
) -> tuple[HybridModel, Tokenizer | None]:
    """Load a model as one of a Hugging Face config, with its own tokenizer or the config's."""
    folder = path.parent if path.name == CONFIG_FILE else path
    theirs = read_config(folder)
    if theirs.huggingface_config is None:
        raise CheckpointError(f"{folder / CONFIG_FILE} is not one of Hugging Face.")
    if load is _load_torch_dist:  # Megatron pads the vocabulary, and spells some fields otherwise
        found = megatron_form(DistributedTensors(source).config(vocab_size=theirs.vocab_size))
        expected = megatron_form(theirs)
        names = ("vocab_size", "layer_overrides", *theirs.differences(expected))
        options |= {name: getattr(theirs, name) for name in names}
    else:
        found, expected = read_config(source), theirs
        if found.huggingface_config is not None:
            raise CheckpointError(
                f"{source} has a Hugging Face config of its own, which another one would "
                f"contradict. Leave out {path}."
            )
    for name in found.differences(expected):
        raise CheckpointError(
            f"{source} has {name}={getattr(found, name)!r}, but {folder / CONFIG_FILE} says "
            f"{getattr(expected, name)!r}. They are of different models."
        )
    model, tokenizer = load(source, huggingface_config=theirs.huggingface_config, **options)
    return model, tokenizer or load_tokenizer(folder, theirs.vocab_size)
