"""What an adapter is: a config in our terms, and which of our tensors are which of theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.adapters.layouts import SAME, Layout


@dataclass(frozen=True)
class TensorMap:
    """Some of our tensors hold the same numbers as some of theirs."""

    ours: tuple[str, ...]
    """Canonical parameter names (`models/parameter_names.py`)."""
    theirs: tuple[str, ...]
    """Names in the safetensors files."""
    layout: Layout = SAME
    """How the numbers lie in each."""


class Adapter(ABC):
    """One architecture of Hugging Face."""

    model_types: tuple[str, ...]
    """The `model_type`s of config.json that this adapter reads."""

    ignored: tuple[str, ...] = ()
    """Regular expressions of tensor names that hold nothing of the model, such as tables that are
    computed anew; they are neither read nor written."""

    @abstractmethod
    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of HybridConfig for a config.json. `params_dtype` is filled in by the caller, and
        `huggingface_config` too where the adapter does not put another config.json there, that of
        the part of a composite model which this one is.

        Raises:
            ValueError: the config asks for what cannot be done here; names key and value.
        """

    @abstractmethod
    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        """Every tensor of the model, once; `config.huggingface_config` is the config.json."""

    def as_found(
        self, tensor_map: TensorMap, config: HybridConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> TensorMap:
        """One of `tensors` for reading a folder that holds tensors of these names and shapes.

        For architectures whose folders are of several kinds; `tensors` is what gets written.
        """
        return tensor_map
