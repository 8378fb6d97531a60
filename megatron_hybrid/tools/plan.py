"""`megatron-hybrid plan`: memory and bounds of speed of a model, computed from its config, and
from the headers of packed weights.

The model is built on the meta device, which shows its cache requirements.
"""

import math
import os
import re
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.checkpoints.folder import CheckpointFolder, quantization_of
from megatron_hybrid.checkpoints.found_tensors import pack_as_in
from megatron_hybrid.checkpoints.pretrained import model_folder, open_config
from megatron_hybrid.checkpoints.tensor_files import INDEX_FILE, WEIGHTS_FILE
from megatron_hybrid.inference.config import InferenceConfig, StateEncoding
from megatron_hybrid.inference.memory.budget import LARGEST_STEP, step_bytes
from megatron_hybrid.inference.memory.cache_pool import cache_spec_of
from megatron_hybrid.inference.scheduling.scheduler import max_captures
from megatron_hybrid.inference.worker.allocation import LIVE_SLOTS, needs_of
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.flops import attention_parity, token_flops
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.layer_pattern import LayerPattern
from megatron_hybrid.models.packed_weight import PackedWeight, named_weights
from megatron_hybrid.tools.quantize import pack_as
from megatron_hybrid.tools.rates import WIDTH, Rates, predict, render_rates
from megatron_hybrid.tools.roofline import Device, ModelWork, num_bytes
from megatron_hybrid.utils.tables import size, table
from megatron_hybrid.utils.validation import check_field

MEMORY_FRACTION = InferenceConfig.memory_fraction
_CACHE_BLOCKS = (16, 32, 64, 128, 256)
_TABLE_BLOCKS = 2048  # a much longer row of a block table costs more than finer sharing saves
_MOST_REQUESTS = 1024
_RATED_LENGTHS = (8_000, 64_000)
"""Tokens of prompts and contexts whose speed is bounded, in addition to the planned one."""
_UNITS = {"": 1, "k": 1000, "m": 10**6}


@dataclass(frozen=True)
class Footprint:
    """Memory of one model, and capacity of a device that holds it. Sizes in bytes."""

    kv_bytes_per_token: int
    """K and V of a token in all full-attention layers."""
    window_bytes: int
    """K and V of one request's window and chunked layers at the context."""
    state_bytes: int
    """Recurrent states and convolution tails of one sequence."""
    checkpoint_bytes: int
    """States, window blocks and last hidden state of a restorable position, without its KV."""
    break_even_tokens: int | None
    """Tokens whose KV costs as much as one checkpoint; None without KV, or without a state."""
    request_bytes: int
    """One running request at the context, with the states for the rollback of its drafts."""
    largest_batch: int
    """Most concurrent requests at the context."""
    cached_prefixes: int
    """Capacity of the pool in prefixes of the context's length, each with one checkpoint."""
    cached_tokens: int | None
    """Capacity of the pool in tokens without checkpoints; None if the model has no KV."""
    checkpoints: int | None
    """Capacity of the pool in checkpoints without KV; None if the model has no state to save."""


@dataclass(frozen=True)
class Plan:
    """Result of `plan`."""

    layer_pattern: str
    parameters: int
    weight_bytes: int
    dtype: str
    """Dtype of weights and KV."""
    quantization: str | None
    """Format of quantized weights: as published ("fp8"), or the one that was asked for."""
    counts_packed: bool
    """Whether `weight_bytes` counts packed weights, those of the folder or as asked for."""
    memory_bytes: int
    parts: dict[str, int]
    """Bytes that an engine needs in addition to weights, requests and cache, by name."""
    cache_bytes: int
    """Bytes for live requests and cached prefixes: the default part of what weights and `parts`
    leave; 0 if these do not fit."""
    context: int
    model: Footprint
    pure_attention: Footprint
    """The same model with full attention in place of every recurrent, window and chunked layer."""
    settings: dict[str, Any] | None
    """Recommended fields of InferenceConfig; None if there is no room for one request."""
    rates: Rates | None
    """Bounds of the speed; None without a device."""


def read_model_config(path: str | os.PathLike, mtp: bool = False) -> HybridConfig:
    """Read the config of a checkpoint folder ("demo" is the one in the package) or of a single
    config.json, ours or Hugging Face's. For quantized weights it is that of the dequantized model.

    mtp: include the MTP head, which is loaded only to draft with it.

    Raises:
        CheckpointError: the config cannot be read or used.
    """
    return open_config(path).config(mtp, as_announced=True, perform_initialization=False)


def packed_folder(path: str | os.PathLike) -> Path | None:
    """Return the folder of a model's packed weights, or None if they are unpacked or not here."""
    folder = model_folder(path)
    has_weights = any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))
    if not has_weights:
        return None
    return folder if CheckpointFolder(folder).is_packed else None


def parse_count(text: str) -> int:
    """Parse a number of tokens, such as "4096", "100k" or "1.5M".

    Raises:
        ValueError: the text is no such number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    count = Fraction(match[1]) * _UNITS[match[2]] if match else Fraction()
    if count < 1 or count.denominator > 1:
        raise ValueError(f"{text!r} is no number of tokens; write 4096, 100k or 1M.")
    return int(count)


def plan(
    config: HybridConfig,
    memory_bytes: int,
    context: int,
    state_encoding: str = "exact",
    device: Device | None = None,
    folder: str | os.PathLike | None = None,
    weights: str | None = None,
    num_speculative_tokens: int = 0,
    cuda_graphs: bool = False,
) -> Plan:
    """Compute how a model fits into one device's memory, and how fast it is at best.

    Args:
        config: that of the model, with tensor_model_parallel_size 1.
        memory_bytes: memory of the device.
        context: tokens of a request, prompt and answer.
        state_encoding: that of checkpoints, as in InferenceConfig.
        device: its rooflines bound the speed; None leaves out the speed.
        folder: that of the model's weights, whose headers show which are packed. Without it all
            count as unpacked.
        weights: format of `tools.quantize` in which the layers' weights count; None keeps theirs.
        num_speculative_tokens: drafts of each request in a step; 0 means none.
        cuda_graphs: whether decodes are captured.

    Raises:
        ValueError: an unknown encoding, or a negative number of drafts.
        CheckpointError: the weights in the folder are not of this model.
    """
    check_field("num_speculative_tokens", num_speculative_tokens, int)
    with torch.device("meta"):
        model = build_hybrid_model(config)
    if weights is not None:
        pack_as(model, weights)
    elif folder is not None:
        pack_as_in(model, folder)
    weight_bytes = num_bytes(model.parameters())
    block = next((b for b in _CACHE_BLOCKS if context <= b * _TABLE_BLOCKS), _CACHE_BLOCKS[-1])
    spec = spec_of(model, block, state_encoding)
    asked: dict[str, Any] = {}
    if num_speculative_tokens:
        asked["speculation"] = "mtp" if model.prediction_requirements() else "lookup"
        asked["num_speculative_tokens"] = num_speculative_tokens
    if cuda_graphs:
        asked["cuda_graphs"] = True
    lengths = {"block_size_tokens": block, "max_sequence_length": context}
    slot = (1 + num_speculative_tokens) * (spec.state_bytes + spec.hidden_bytes)

    @cache
    def fit(requests: int) -> tuple[dict[str, int], int, Footprint]:
        """Return the engine's parts for so many requests, bytes of the cache, and its capacity."""
        sizes = requests, InferenceConfig.max_tokens
        engine = InferenceConfig(max_requests=requests, **lengths, **asked)
        needs = needs_of(model, spec, engine, torch.device("meta"))
        parts = {part.what: part.num_bytes for part in needs.parts if not part.on_host}
        del parts[LIVE_SLOTS]  # counted in each request, with the states before its drafts
        parts[LARGEST_STEP] = step_bytes(model, spec, max_captures(spec, *sizes), *sizes, context)
        left = memory_bytes - weight_bytes - sum(parts.values())
        cache_bytes = max(0, int(left * MEMORY_FRACTION))
        return parts, cache_bytes, _footprint(spec, cache_bytes, context, slot)

    def half(requests: int) -> int:
        """Halve the largest batch, so that half of the memory can hold cached prefixes."""
        return min(max(1, fit(requests)[-1].largest_batch // 2), _MOST_REQUESTS)

    usual = InferenceConfig.max_requests
    requests = half(usual)
    if requests > usual:  # the more there may be, the less is left for each
        too_many = range(requests + 1), True, usual + 1
        requests = bisect_left(*too_many, key=lambda more: half(more) < more) - 1
    parts, cache_bytes, footprint = fit(max(usual, requests))
    published = quantization_of(config.huggingface_config or {}) or {}
    rates = None
    if device is not None:
        rated = sorted({*_RATED_LENGTHS, context})
        batches = {n: _footprint(spec, cache_bytes, n, slot).largest_batch for n in rated}
        rates = predict(ModelWork.of(model, spec), device, batches)
    settings = None
    if footprint.largest_batch:
        settings = {
            "prefix_caching": "restore",
            "cache_bytes": cache_bytes - requests * slot,
            "max_requests": requests,
            "state_encoding": state_encoding,
            **lengths,
            **asked,
        }
    pure = _pure_attention(spec, config, model)
    all_weights = [weight for _, weight in named_weights(model)]
    formats = {weight.format.name for weight in all_weights if isinstance(weight, PackedWeight)}
    return Plan(
        layer_pattern=config.layer_pattern,
        parameters=sum(weight.numel() for weight in all_weights),
        weight_bytes=weight_bytes,
        dtype=str(config.params_dtype).removeprefix("torch."),
        quantization=weights or published.get("quant_method") or ", ".join(sorted(formats)) or None,
        counts_packed=weights is not None or model.packed_source is not None,
        memory_bytes=memory_bytes,
        parts=parts,
        cache_bytes=cache_bytes,
        context=context,
        model=footprint,
        pure_attention=_footprint(pure, cache_bytes, context, pure.hidden_bytes),
        settings=settings,
        rates=rates,
    )


def spec_of(model: HybridModel, block: int, state_encoding: str) -> CacheSpec:
    """Return the cache spec of a model, which may be on the meta device, with KV in the dtype of
    its parameters.

    Raises:
        ValueError: an unknown encoding.
    """
    check_field("state_encoding", state_encoding, StateEncoding)
    layers, config = model.cache_requirements(), model.config
    layers = [*layers, *model.prediction_requirements()]
    dtype, parity = config.params_dtype, attention_parity(*token_flops(model))
    return cache_spec_of(layers, config.hidden_size, dtype, block, state_encoding, parity)


def _footprint(spec: CacheSpec, cache_bytes: int, context: int, slot_bytes: int) -> Footprint:
    """Compute the footprint. `slot_bytes` is the size of the live states of one request."""
    per_token = window = 0
    for index, group in enumerate(spec.groups):
        token_bytes = group.num_layers * group.bytes_per_token
        if index in spec.full_groups:
            per_token += token_bytes
        else:
            reach = min(context, group.window or group.chunk)
            window += spec.num_blocks(reach) * spec.block_size_tokens * token_bytes
    checkpoint = window + spec.checkpoint_bytes if spec.needs_state else 0
    request = context * per_token + window + slot_bytes
    prefix = context * per_token + checkpoint
    num_pages = cache_bytes // spec.page_bytes
    return Footprint(
        kv_bytes_per_token=per_token,
        window_bytes=window,
        state_bytes=spec.state_bytes,
        checkpoint_bytes=checkpoint,
        break_even_tokens=math.ceil(checkpoint / per_token) if per_token and checkpoint else None,
        request_bytes=request,
        largest_batch=cache_bytes // request,
        cached_prefixes=cache_bytes // prefix,
        cached_tokens=spec.tokens_in(num_pages) if per_token else None,
        checkpoints=spec.states_in(num_pages) if checkpoint else None,
    )


def _pure_attention(spec: CacheSpec, config: HybridConfig, model: HybridModel) -> CacheSpec:
    """Return the spec with full attention in every layer that caches anything. Its K and V are as
    wide as the widest of the model's own attention layers, or without any as the hidden state."""
    layers = sum(layer.kv is not None or bool(layer.states) for layer in model.cache_requirements())
    plain = 2 * config.hidden_size * config.params_dtype.itemsize
    widest = max((group.bytes_per_token for group in spec.groups), default=plain)
    return CacheSpec(spec.block_size_tokens, (KVGroup(layers, widest),), 0, spec.hidden_bytes)


def render(result: Plan) -> str:
    ours, pure = result.model, result.pure_attention

    def count(number: int | None) -> str:
        return "-" if number is None else f"{number:,}"

    rows = [
        ("KV per token", size(ours.kv_bytes_per_token), size(pure.kv_bytes_per_token)),
        ("windows of a request", size(ours.window_bytes), size(pure.window_bytes)),
        ("states of a request", size(ours.state_bytes), size(pure.state_bytes)),
        ("one checkpoint", size(ours.checkpoint_bytes), size(pure.checkpoint_bytes)),
        ("break-even length, tokens", count(ours.break_even_tokens), "-"),
        ("one request", size(ours.request_bytes), size(pure.request_bytes)),
        ("largest batch", count(ours.largest_batch), count(pure.largest_batch)),
        ("cached prefixes", count(ours.cached_prefixes), count(pure.cached_prefixes)),
        ("tokens of KV alone", count(ours.cached_tokens), count(pure.cached_tokens)),
        ("checkpoints alone", count(ours.checkpoints), count(pure.checkpoints)),
    ]
    symbols = LayerPattern.parse(result.layer_pattern).symbols
    if result.settings is None:
        advice = wrap(
            f"no room: the weights take {size(result.weight_bytes)} of "
            f"{size(result.memory_bytes)}, and one request of {result.context:,} tokens "
            f"{size(ours.request_bytes)}, the largest step "
            f"{size(result.parts[LARGEST_STEP])}. "
            "Give more memory (that of all devices which share the model), or a shorter context",
            WIDTH,
        )
    else:
        advice = [
            "recommended, half of the largest batch, so that prefixes have room:",
            "InferenceConfig(",
            *(f"    {key}={value!r}," for key, value in result.settings.items()),
            ")",
        ]
    published = ""
    if result.counts_packed:
        published = f" and {result.quantization}"
    elif result.quantization is not None:
        published = f" (published as {result.quantization}: with the weights there, they count so)"
    lines = [
        *wrap(
            f"{len(symbols)} layers in the pattern, {result.parameters:,} parameters, "
            f"weights {size(result.weight_bytes)} in {result.dtype}{published}",
            WIDTH,
        ),
        f"{size(result.memory_bytes)} of memory, of which an engine takes, besides weights,",
        *(f"  {size(part)} for {what}" for what, part in result.parts.items() if part),
        f"and {MEMORY_FRACTION:.0%} of the rest for requests and cache: {size(result.cache_bytes)}",
        f"context of a request {result.context:,} tokens",
        "",
        *table(("", "this model", "pure attention"), rows),
        "",
        *advice,
        *(["", *render_rates(result.rates)] if result.rates else []),
    ]
    return "\n".join(lines)
