"""What an adapter is: a config in our terms, and which of our tensors are which of theirs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.layouts import TensorMap
from megatron_hybrid.checkpoints.huggingface.tensors import TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a folder's tensors, by the names that they have in one of the language model alone."""


class Adapter(ABC):
    """One architecture of Hugging Face."""

    model_types: tuple[str, ...]
    """The `model_type`s of config.json that this adapter reads."""

    composite_types: tuple[str, ...] = ()
    """The `model_type`s of models that take images or sound too, and whose `text_config` is of one
    of `model_types`. Their language model is read, and written as a folder of that alone."""

    composite_tied: bool = False
    """`tie_word_embeddings` of such a model whose config.json does not say it."""

    prediction_names: tuple[str, ...] = ()
    """Regular expressions of the tensor names of MTP heads."""

    names: TensorNames
    """What they call the tensors; an adapter whose `tensors` goes another way has none."""

    ignored: tuple[str, ...] = ()
    """Regular expressions of tensor names that hold nothing of the model, such as tables that are
    computed anew; they are neither read nor written."""

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of the language model: `hf` itself, or what a composite one says of it.

        Raises:
            ValueError: a composite one says nothing of it, or it is another model.
        """
        if hf["model_type"] not in self.composite_types:
            return dict(hf)
        text = hf.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(f"config.json has text_config={text!r}, where its language model goes")
        defaults = {"model_type": self.model_types[0], "tie_word_embeddings": self.composite_tied}
        text = {**defaults, **text}
        if text["model_type"] not in self.model_types:
            raise ValueError(
                f"config.json has a text_config of the model_type {text['model_type']!r}; only "
                f"{' or '.join(map(repr, self.model_types))} is supported"
            )
        whole = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
        text |= {key: hf[key] for key in whole if hf.get(key) is not None}
        if (quantization := text.get("quantization_config")) is not None:
            text["quantization_config"] = self._text_names(quantization)
        return text

    def _text_names(self, value: Any) -> Any:
        """Return what a quantization_config says, with the names of `text_name`."""
        if isinstance(value, Mapping):
            return {self._text_names(key): self._text_names(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._text_names(each) for each in value]
        return self.text_name(value) if isinstance(value, str) else value

    def text_name(self, name: str) -> str:
        """Return what a folder of the language model alone calls a tensor of a folder."""
        spellings = {"model.language_model.": "model.", "language_model.": ""}
        for prefix, plain in spellings.items() if self.composite_types else ():
            if name.startswith(prefix):
                return plain + name.removeprefix(prefix)
        return name

    def ignored_names(self, names: Collection[str], config: HybridConfig) -> set[str]:
        """Return which tensors of a folder (`text_name`) hold nothing of the model: those of
        `ignored`, copies, and those of an MTP head that the config does not have."""
        ignored = self.ignored
        if not config.pattern.predictions:
            ignored += self.prediction_names
        patterns = [re.compile(pattern) for pattern in ignored]
        found = {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}
        return found | (set(names) & self.copies(config).keys())

    @abstractmethod
    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of HybridConfig for a config.json (`text_config`). `params_dtype` and
        `huggingface_config` are filled in by the caller.

        Raises:
            ValueError: the config asks for what cannot be done here; names key and value.
        """

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        """Every tensor of the model, once; `config.huggingface_config` is the config.json."""
        yield from self.names.tensors(config)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        """The layers of an MTP head; "": there is none, or none that is read.

        Args:
            hf: config.json (`text_config`).
            names: of the tensors of its folder (`text_name`); None: as config.json announces.
        """
        return ""

    def copies(self, config: HybridConfig) -> dict[str, str]:
        """Tensors of a folder that are copies of others, with the names of these."""
        return {}

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """One of `tensors` for reading a folder that holds tensors of these shapes.

        For architectures whose folders are of several kinds; `tensors` is what gets written.
        """
        return tensor_map

    def one_by_one(self, tensor_map: TensorMap, config: HybridConfig) -> TensorMap:
        """One of `tensors` as quantized folders have it: experts that lie in one tensor have names
        of their own there. Others, and where no such folders are known, as it is."""
        return tensor_map
