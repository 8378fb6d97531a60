"""`megatron-hybrid doctor`: what a model folder or a config.json holds, and whether it loads.

It checks what loading checks, including the numbers of all weights, and allocates no model."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.checkpoints.checkpoint import checked_load
from megatron_hybrid.checkpoints.folder import CheckpointFolder, huggingface_config
from megatron_hybrid.checkpoints.huggingface import ADAPTERS
from megatron_hybrid.checkpoints.huggingface.base import language_part
from megatron_hybrid.checkpoints.model_tensors import names_of_all_stages
from megatron_hybrid.checkpoints.pretrained import load_tokenizer, model_folder, open_config
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.builder import RequestBuilder
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.tools.plan import spec_of


def examine(
    path: str | os.PathLike[str],
) -> tuple[list[tuple[str, str]], Tokenizer | None, str | None]:
    """Examine a folder ("demo", too) or a config.json. Return rows of a name and a text, its
    tokenizer, and why the model does not load or answers no request, None if it does both.

    Raises:
        CheckpointError: there is no config.json that can be read.
    """
    opened, model, tokenizer, refusal = open_config(path), None, None, None
    is_packed = bool(opened.tensor_names()) and opened.is_packed
    method = (opened.quantization or {}).get("quant_method", "of this library")
    kind = str(method) if is_packed or opened.quantization else "none"
    rows = [*_stated(opened.values), ("quantization", kind)]
    try:
        config = opened.config(as_announced=True, perform_initialization=False)
        with torch.device("meta"):
            model = build_hybrid_model(config)
        parameters = sum(p.numel() for p in model.parameters())
        opened.check_quantization()
        tokenizer = load_tokenizer(opened.path, config.vocab_size, opened.values)
        if model_folder(path).is_dir():
            with checked_load(model, opened, names_of_all_stages(model)):
                pass  # nothing is to be written
        _check_requests(model, tokenizer)
    except (ValueError, TypeError) as error:
        refusal = str(error)
        if str(opened.values.get("model_type")) not in ADAPTERS:
            rows += _nearest(opened)
    if model is not None:
        rows += _layers(model, parameters)
    return rows, tokenizer, refusal


def _check_requests(model: HybridModel, tokenizer: Tokenizer | None) -> None:
    """Raise the error that an engine would raise for every request, if the folder's values for
    sampling or its end tokens are illegal."""
    cache = PrefixCache(spec_of(model, 16, "exact"), 64)
    builder = RequestBuilder(InferenceConfig(), cache, tokenizer, model.vocab_size)
    builder.build([0], SamplingParams(num_tokens_to_generate=1), None)


def _stated(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield rows of what config.json says, which loading may refuse."""
    own = "a checkpoint of this library" if "layer_pattern" in values else "unknown"
    yield "architecture", str(values.get("model_type", own))
    text = language_part(values) or values
    if text is not values:
        yield "language model", str(text.get("model_type"))
    if (context := text.get("max_position_embeddings", text.get("max_seq_len"))) is not None:
        yield "context", f"{context:,} tokens" if isinstance(context, int) else str(context)


def _layers(model: HybridModel, parameters: int) -> Iterator[tuple[str, str]]:
    config = model.config
    yield "layer_pattern", config.layer_pattern
    kinds = Counter(LAYER_KINDS[symbol].meaning for symbol in config.pattern.symbols)
    yield "layers", ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    if config.pattern.predictions:
        yield "MTP head", "yes; `serve --speculation mtp` drafts with it"
    yield "parameters", f"{parameters:,}"
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    weights = sum(p.nbytes for p in model.parameters())
    yield "weights", f"{weights / 1e9:.3f} GB in {', '.join(sorted(dtypes))}"
    spec = spec_of(model, 16, "exact")
    yield "KV per token", f"{spec.kv_bytes_per_token:,} bytes"
    yield "states", f"{spec.state_bytes:,} bytes for each sequence or saved position"


def _nearest(opened: CheckpointFolder) -> Iterator[tuple[str, str]]:
    """Yield rows of the known architecture whose tensors are most like those of an unknown one."""
    values = opened.values
    names = set(opened.tensor_names())
    found: list[tuple[float, str, set[str]]] = []
    for model_type in ADAPTERS:
        try:
            config = huggingface_config({**values, "model_type": model_type}, "", None)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
            continue
        theirs = {t for m in ADAPTERS[model_type]().tensors(config) for t in m.theirs}
        found.append((len(theirs & names) / len(theirs | names), model_type, theirs ^ names))
    if not names or not found:
        return
    _, model_type, differing = max(found)
    yield "nearest", f"{model_type}, but for {len(differing)} tensors"
    if differing:
        yield "such as", ", ".join(sorted(differing)[:4])
