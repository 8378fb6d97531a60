"""CheckpointFolder: a folder's config.json and the headers of its tensor files, each read once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid.checkpoints.huggingface import ADAPTERS
from megatron_hybrid.checkpoints.huggingface.base import PLAIN_AROUND, Adapter, language_part
from megatron_hybrid.checkpoints.huggingface.fields import check_general_keys
from megatron_hybrid.checkpoints.quantization_config import QUANT_FILE, Quantization
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorFiles
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import PREDICTION_BOUNDARY, split_predictions
from megatron_hybrid.utils.files import read_json

CONFIG_FILE = "config.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
METADATA_FILE = ".metadata"
"""Files of Megatron's folders, and of one iteration in them."""
ADAPTER_FILE = "adapter_config.json"
"""Config of an adapter that PEFT wrote."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_torch_dist(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder looks like one of Megatron's, or one iteration of it."""
    folder = Path(folder)
    return (folder / TRACKER_FILE).is_file() or (folder / METADATA_FILE).is_file()


class CheckpointFolder:
    """A folder of ours or of Hugging Face.

    Args:
        path: of the folder.
        config_name: of the file with its config.

    Raises:
        CheckpointError: the config is missing, unreadable or not a JSON object.
    """

    def __init__(self, path: str | os.PathLike[str], config_name: str = CONFIG_FILE):
        self.path = Path(path)
        self.config_file = self.path / config_name
        self.values = _read_json(self.config_file)
        """Content of config.json, with the quantization_config that ModelOpt may have put into a
        file of its own."""
        if self.quantization is None and os.path.lexists(self.path / QUANT_FILE):
            self.values["quantization_config"] = _modelopt_config(self.path / QUANT_FILE)

    @cached_property
    def files(self) -> TensorFiles:
        """The tensor files, opened when they are first asked for.

        Raises:
            CheckpointError: there are none, or unreadable ones.
        """
        return TensorFiles(self.path)

    @property
    def is_huggingface(self) -> bool:
        return _is_huggingface(self.values)

    @property
    def adapter(self) -> Adapter:
        """The adapter of a folder of Hugging Face.

        Raises:
            CheckpointError: there is none for its model_type.
        """
        return _adapter(self.values, str(self.config_file))

    @property
    def is_unknown_around(self) -> bool:
        """Whether the folder is of `PLAIN_AROUND`: the prefix shows its language model."""
        return str(self.values.get("model_type")) in PLAIN_AROUND

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantization_config; None if the weights are not quantized."""
        return quantization_of(self.values)

    @property
    def is_packed(self) -> bool:
        """Whether the weights are quantized, by the config or the headers of the tensor files."""
        has_codes = (name.endswith(".weight.codes") for name in self.files.names())
        return self.quantization is not None or any(has_codes)

    def check_quantization(self) -> None:
        """Raise CheckpointError if the weights are quantized in a format that is not read."""
        if (found := self.quantization) is not None:
            Quantization.read(found, str(self.config_file))

    def config(
        self, mtp: bool = True, as_announced: bool = False, **overrides: Any
    ) -> HybridConfig:
        """Make the config of the model; `overrides` replace its fields. For quantized weights, it
        is that of the dequantized model.

        Args:
            mtp: with the MTP heads that the folder has.
            as_announced: without weights, with those that config.json announces.
            overrides: fields of HybridConfig.

        Raises:
            CheckpointError: not a usable config, or of an unknown architecture.
            ValueError, TypeError: an override is not possible.
        """
        names = self.tensor_names() or (None if as_announced else [])
        return config_of(self._with_dtype(), str(self.config_file), names, mtp, **overrides)

    def tensor_names(self) -> list[str]:
        """Name all weights; none where there are unreadable ones, which their loading reports."""
        try:
            return self.files.names()
        except CheckpointError:
            return []

    def _with_dtype(self) -> Mapping[str, Any]:
        """Return the values with a `dtype`, which a config.json of Hugging Face may lack: bfloat16
        for quantized weights, else that of the first floating-point tensor, as in transformers.
        Without weights none is added, which means float32."""
        parts = _with_text_config(self.values)
        named = any(part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
        if named or not self.is_huggingface:
            return self.values
        if self.quantization is not None:
            return {**self.values, "dtype": "bfloat16"}
        found = None
        with suppress(CheckpointError):  # their loading reports it
            dtypes = map(self.files.dtype, self.files.names())
            found = next((dtype for dtype in dtypes if dtype in FLOATS), None)
        if found is None:
            return self.values
        return {**self.values, "dtype": str(found).removeprefix("torch.")}


def config_of(
    values: Mapping[str, Any],
    source: str,
    tensor_names: Collection[str] | None = (),
    mtp: bool = True,
    **overrides: Any,
) -> HybridConfig:
    """Convert the content of a config.json. A quantization is ignored.

    Args:
        tensor_names: of the weights of a Hugging Face folder, which say whether it has an MTP
            head. None means what config.json says of that.
        mtp: with such parts; over several pipeline stages they are left out in any case.

    Raises:
        CheckpointError: not a usable config, or of an unknown architecture.
        ValueError, TypeError: an override is not possible.
    """
    # The stage after the last layer has no embedding, which the parts need.
    mtp = mtp and (overrides.get("pipeline_model_parallel_size") or 1) == 1
    try:
        if _is_huggingface(values):
            return huggingface_config(values, source, tensor_names if mtp else (), **overrides)
        if "layer_pattern" not in values:
            raise CheckpointError(
                f"{source} has neither a layer_pattern, as ours have, nor a model_type, as those "
                "of transformers have. Convert the model to one of these."
            )
        if not mtp:
            main = split_predictions(values["layer_pattern"])[0]
            values = {**values, "layer_pattern": main}
        return HybridConfig.from_dict(values, **overrides)
    except CheckpointError:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        if overrides:
            # This raises CheckpointError if the file is at fault.
            config_of(values, source, tensor_names, mtp)
            raise
        raise CheckpointError(f"{source} is no usable config: {error}") from error


def huggingface_config(
    hf: Mapping[str, Any],
    source: str,
    tensor_names: Collection[str] | None = (),
    **overrides: Any,
) -> HybridConfig:
    """Convert a config.json of Hugging Face, as `config_of`, with errors of all kinds."""
    adapter = _adapter(hf, source)
    hf = adapter.text_config(hf)
    check_general_keys(hf)
    fields = {**adapter.config(hf), "huggingface_config": hf}
    if tensor_names is not None:
        tensor_names = {adapter.text_name(name) for name in tensor_names}
    part = adapter.prediction_layers(hf, tensor_names)
    if part and ("E" not in part or "num_moe_experts" in fields):
        fields["layer_pattern"] += PREDICTION_BOUNDARY + part
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    fields["params_dtype"] = getattr(torch, str(dtype).removeprefix("torch."), dtype)
    return HybridConfig(**{**fields, **overrides})


def quantization_of(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find the quantization_config in a config.json; None if the weights are not quantized."""
    for part in _with_text_config(values):
        if isinstance(found := part.get("quantization_config"), Mapping) and found:
            # Older releases of ModelOpt leave out its name.
            return {"quant_method": "modelopt", **found} if "quant_algo" in found else found
    return None


def check_free(folder: Path) -> None:
    """Raise CheckpointError for a folder to write that is a file, or not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise CheckpointError(f"{folder} {what}. Name a folder that does not exist yet.")


def adapter_of(config: HybridConfig) -> Adapter | None:
    """Find the adapter of the Hugging Face folder that a config was read from, if it was."""
    hf = config.huggingface_config
    return None if hf is None else _adapter(hf, "huggingface_config")


def _adapter(hf: Mapping[str, Any], source: str) -> Adapter:
    model_type = hf.get("model_type")
    part = hf
    if isinstance(model_type, str) and model_type in PLAIN_AROUND:
        part = language_part(hf) or {}
    if isinstance(known := part.get("model_type"), str) and known in ADAPTERS:
        return ADAPTERS[known]()
    near = difflib.get_close_matches(str(model_type), list(ADAPTERS), 1)
    raise CheckpointError(
        f"{source} has the model_type {model_type!r}, which no adapter reads."
        f"{f' The nearest name is {near[0]!r}.' if near else ''} docs/reference/models.md has "
        "those that are read, docs/guides/own_model.md says how to add one."
    )


def _is_huggingface(values: Mapping[str, Any]) -> bool:
    return "layer_pattern" not in values and ("model_type" in values or "architectures" in values)


def _with_text_config(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List a config.json, and what it says of its language model if it is a composite one."""
    text = language_part(values)
    return [values] if text is None else [values, text]


def _modelopt_config(path: Path) -> dict[str, Any]:
    """Return what NVIDIA's ModelOpt says of a quantization in a file of its own."""
    found = _read_json(path).get("quantization")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} says nothing of a quantization. Copy the folder again.")
    return {"quant_method": "modelopt", **found}


def _advice_for_adapter(path: Path) -> str:
    """Return what to do with a folder that has an adapter of PEFT, and no model."""
    base = _read_json(path).get("base_model_name_or_path") or "its base model"
    return (
        f"{path.parent} holds a low-rank adapter of PEFT ({path.name}), and no model. Load {base}, "
        f"and add the adapter to it: serve --max-adapters 1 --adapter NAME={path.parent}, or "
        f"engine.adapters.load(name, {str(path.parent)!r}); see docs/guides/serving_adapters.md."
    )


def _read_json(path: Path) -> dict[str, Any]:
    if os.path.lexists(path):
        return read_json(path, CheckpointError)
    if (adapter := path.parent / ADAPTER_FILE).is_file():
        raise CheckpointError(_advice_for_adapter(adapter))
    # In the folder of a training run; in that of a model in the cache of Hugging Face.
    places = f"exported/{path.name}", f"snapshots/*/{path.name}"
    found = [each for place in places for each in path.parent.glob(place)]
    such = f", such as {max(found, key=os.path.getmtime).parent}" if found else ""
    if not such and is_torch_dist(path.parent):
        such = f". This one is Megatron's: `megatron-hybrid convert {path.parent} NEW` reads it"
    raise CheckpointError(
        f"{path} does not exist: name a folder with a checkpoint, or its config.json{such}"
    )
