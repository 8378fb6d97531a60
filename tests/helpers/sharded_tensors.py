"""What a sharded state dict would write, without writing it."""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


def pieces(sharded_state_dict):
    """(key, global shape, global offset, allow_shape_mismatch, values) of every tensor piece."""
    found = []
    for value in sharded_state_dict.values():
        parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        found += [
            (
                part.key,
                part.global_shape,
                part.global_offset,
                part.allow_shape_mismatch,
                part.data.detach().clone(),
            )
            for part in parts
            if isinstance(part, ShardedTensor)
        ]
    return sorted(found, key=lambda piece: piece[:3])


def whole(*ranks):
    """The whole tensors by key, from the pieces of every rank."""
    tensors = {}
    for key, shape, offset, _, values in (piece for rank in ranks for piece in rank):
        full = tensors.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
        values = values[(None,) * (len(shape) - values.dim())]  # one expert of a stack
        full[tuple(slice(at, at + n) for at, n in zip(offset, values.shape))] = values
    return tensors
