"""What an adapter is: a config in our terms, and which of our tensors are which of theirs."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.layouts import TensorMap
from megatron_hybrid.checkpoints.huggingface.tensors import (
    TRANSFORMER,
    TensorNames,
    experts_one_by_one,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a folder's tensors, by the names that they have in one of the language model alone."""


_LANGUAGE_PREFIXES = {
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",
    "model.text_model.": "model.",
}
"""What names of the language model in a composite one begin with -> in a folder of that alone."""


PLAIN_AROUND = {
    *("aya_vision", "deepseek_vl", "deepseek_vl_hybrid", "glmasr", "idefics3", "internvl"),
    *("janus", "kimi_k25", "lfm2_vl", "llava", "llava_next", "llava_next_video", "llava_onevision"),
    *("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mistral3", "nemotron_h_omni", "omniasr"),
    *("shieldgemma2", "smolvlm", "video_llava", "vipllava", "voxtral"),
}
"""Composite models that compute a text as their language model alone does. Others may not: the
prompt of PaliGemma is attended both ways."""


def language_part(hf: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a composite config.json says of its language model."""
    found = (hf.get(key) for key in ("text_config", "llm_config", "language_config"))
    return next((part for part in found if isinstance(part, Mapping)), None)


def is_of_language_model(name: str) -> bool:
    """Return whether a tensor of a composite model's folder is of its language model."""
    return name.startswith((*_LANGUAGE_PREFIXES, "lm_head."))


class Adapter(ABC):
    """One architecture of Hugging Face; where a docstring does not say which, that of its name and
    ForCausalLM."""

    model_types: tuple[str, ...]
    """The `model_type`s of config.json that this adapter reads."""

    composite_types: tuple[str, ...] = ()
    """The `model_type`s of models that take images or sound too, and whose `text_config` is of one
    of `model_types`: those that need not say so, or have more than it in their language model.
    Their language model is read, and written as a folder of that alone."""

    composite_tied: bool = False
    """`tie_word_embeddings` of such a model whose config.json does not say it."""

    stacks_experts: bool = False
    """Whether the experts of a layer lie in one tensor, and one by one in quantized folders."""

    prediction_names: tuple[str, ...] = ()
    """Regular expressions of the tensor names of MTP heads."""

    names: TensorNames = TensorNames(TRANSFORMER)
    """What they call the tensors; an adapter whose `tensors` goes another way does without."""

    module_names: tuple[tuple[str, str], ...] = ()
    """Regular expressions of parts of tensor names -> what transformers calls these modules, where
    its folders have other names."""

    ignored: tuple[str, ...] = ()
    """Regular expressions of tensor names that hold nothing of the model, such as tables that are
    computed anew; they are neither read nor written."""

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the language model: `hf`, or what a composite one says of it.

        Raises:
            ValueError: a composite one says nothing of it, or it is another model.
        """
        if hf["model_type"] in self.model_types:
            return dict(hf)
        text = language_part(hf)
        if text is None:
            found = hf.get("text_config")
            raise ValueError(
                f"config.json has text_config={found!r}, where its language model goes"
            )
        defaults: dict[str, Any] = {"model_type": self.model_types[0]}
        if hf["model_type"] in self.composite_types:  # in others the language model's default holds
            defaults["tie_word_embeddings"] = self.composite_tied
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
        for prefix, plain in _LANGUAGE_PREFIXES.items():
            if name.startswith(prefix):
                return plain + name.removeprefix(prefix)
        return name

    def module_name(self, name: str) -> str:
        """Return what transformers calls a module, from the name in a folder or this name."""
        for found, module in self.module_names:
            name = re.sub(found, module, name)
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
        """Convert a config.json (`text_config`) to fields of HybridConfig. `params_dtype` and
        `huggingface_config` are filled in by the caller.

        Raises:
            ValueError: the config asks for what cannot be done here; names key and value.
        """

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        """Map every tensor of the model, once; `config.huggingface_config` is the config.json."""
        yield from self.names.tensors(config)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        """Return the layers of an MTP head; "" if there is none, or none that is read.

        Args:
            hf: config.json (`text_config`).
            names: of the tensors of its folder (`text_name`); None means as announced there.
        """
        return ""

    def copies(self, config: HybridConfig) -> dict[str, str]:
        """Find the tensors of a folder that are copies of others, with the names of these."""
        return {}

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """Choose one of `tensors`, or of its `spellings`, for reading a folder that holds tensors
        of these shapes; `tensors` is what gets written."""
        forms = (tensor_map, *self.spellings(tensor_map, config))
        return next((form for form in forms if form.theirs[0] in shapes), tensor_map)

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """Return other names and layouts that folders have for one of `tensors`. Architectures
        whose folders differ in more than `one_by_one` override it."""
        if (separate := self.one_by_one(tensor_map, config)) is not tensor_map:
            yield separate

    def one_by_one(self, tensor_map: TensorMap, config: HybridConfig) -> TensorMap:
        """Map one of `tensors` as quantized folders have it: experts that lie in one tensor have
        names of their own there. Others, and where no such folders are known, stay as they are."""
        return experts_one_by_one(tensor_map, config) if self.stacks_experts else tensor_map
