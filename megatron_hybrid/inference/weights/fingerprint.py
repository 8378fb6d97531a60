"""Fingerprint of a model: hashes of weights, configuration and layout, which bind its cache, and
the folders that hold some of it."""

import json
from hashlib import blake2b
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.weights.change_detector import forward_hooks
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.offload.disk_store import DiskStore

_CHUNK = 1 << 20
"""Elements to mix at a time: 16 MiB, near a CPU's caches."""
_STEP, _MIX_1, _MIX_2 = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd constants of SplitMix64 (Steele, Lea and Flood 2014), as int64."""
_SAMPLED = 1 << 12
"""Elements of a tensor that `sample_hash` looks at."""


def fingerprint(model: HybridModel, spec: CacheSpec, config: InferenceConfig) -> dict[str, str]:
    """Return values and hashes, by name, of everything that cached states, keys and values depend
    on, on this rank."""
    fields = model.config.to_dict()
    del fields["huggingface_config"]  # the source of the other fields, and much without effect
    configuration = json.dumps(fields, sort_keys=True, default=str)
    # A user's choices first: errors name the first difference.
    return {
        "state_encoding": config.state_encoding,
        "kv_dtype": str(config.kv_cache_dtype or next(model.parameters()).dtype),
        "block_size_tokens": str(spec.block_size_tokens),
        "model_configuration": _hash(configuration),
        "memory_layout": _hash(repr(spec)),
        "modules_and_hooks": _hash(json.dumps(_computation(model))),
        "adapters": repr(getattr(model, "lora_fields", None)),  # their scale is not a tensor
        "weights": weights_hash(model),
    }


def open_folder(
    folder: str | PathLike[str],
    rank: str,
    model: HybridModel,
    spec: CacheSpec,
    config: InferenceConfig,
) -> DiskStore:
    """Open the part of a cache folder that belongs to a rank, by its name.

    Raises:
        CacheFolderError: see `DiskStore`.
    """
    is_cuda = next(model.parameters()).device.type == "cuda"
    made_for = fingerprint(model, spec, config)
    return DiskStore(Path(folder) / rank, spec.page_bytes, made_for, is_cuda)


def _computation(model: nn.Module) -> list[list]:
    """List name and class of each module, with the names of its hooks and of its own `forward`."""
    return [
        [
            path,
            _name(type(module)),
            *[[_name(hook) for hook in hooks.values()] for hooks in forward_hooks(module)],
            *[_name(own) for own in [module.__dict__.get("forward")] if own is not None],
        ]
        for path, module in model.named_modules()
    ]


def _name(value: object) -> str:
    """Return the name of a class or function, or for another object that of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def weights_hash(model) -> str:
    """Hash the names, shapes, dtypes and bits of all tensors of the state dict. Elements are mixed
    with their indices and summed modulo 2^64 on their device: integer sums are equal in any
    order."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue  # Transformer Engine's bookkeeping
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(str(hash_of(tensor)).encode())
    return digest.hexdigest()


@torch.no_grad()
def hash_of(tensor: Tensor) -> int:
    """Hash the bits of a tensor into a number below 2^64."""
    flat = tensor.detach().contiguous().flatten()
    if not flat.numel():
        return 0
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(width)
    total = 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        mixed = torch.arange(start, start + len(part), device=part.device, dtype=torch.int64)
        mixed.mul_(_STEP).add_(part)
        mixed.bitwise_xor_(mixed >> 30).mul_(_MIX_1)
        mixed.bitwise_xor_(mixed >> 27).mul_(_MIX_2)
        mixed.bitwise_xor_(mixed >> 31)
        total += int(mixed.sum())
    return total % 2**64


def sample_hash(tensor: Tensor) -> int:
    """Hash 4,096 to 8,191 elements that are spread over a tensor, or all of a smaller one. The hash
    is 0 if there are none, or if they have more than 8 bytes."""
    flat = tensor.detach().reshape(-1)
    if flat.is_meta or flat.element_size() > 8:
        return 0
    return hash_of(flat[:: max(1, len(flat) // _SAMPLED)])


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
