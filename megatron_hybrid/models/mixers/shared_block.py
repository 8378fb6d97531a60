"""A transformer block that several layers share, each in front of a Mamba mixer of its own (Zamba,
arXiv 2405.16712, and Zamba2, arXiv 2411.15242)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import SHARED_BLOCKS
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.attention import AttentionMixer
from megatron_hybrid.models.mixers.base import KVShape, LayerCache, Mixer, MixerPlace, StackInputs
from megatron_hybrid.models.mixers.mamba1 import Mamba1Mixer
from megatron_hybrid.models.mixers.mamba2 import Mamba2Mixer
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import (
    ReplicatedLinear,
    build_input_projection,
    build_output_projection,
)
from megatron_hybrid.models.sharding.stage_copies import shared_block_owners


class SharedBlockMixer(Mixer):
    """mamba(norm(x + linear(block(x, embedding)))), with a block that several layers share.

    The k-th layer of this kind uses block k mod `num_shared_blocks`. The first layer of a pipeline
    stage that uses a block owns its parameters there; in a forward pass it passes the block to the
    later ones.
    """

    recompute_name = "shared_block"
    recompute_parts = ("core_attn",)

    takes_stack_inputs = True
    norms_input = True

    def __init__(self, config: HybridConfig, place: MixerPlace, is_mamba1: bool = False):
        super().__init__(config)
        self.layer_number = place.layer_number
        stages = config.pattern.stages(config.pipeline_model_parallel_size)
        stage = place.pg_collection.pp.rank()
        before = "".join(stages[:stage]) + stages[stage][: place.layer_number - 1]
        self.block_number = sum(map(before.count, SHARED_BLOCKS)) % config.num_shared_blocks
        owner = shared_block_owners(config)[self.block_number][stage]
        is_owner = owner == len(before)
        self.block = SharedBlock(config, place) if is_owner else None
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.num_groups = max(1, config.num_query_groups // place.pg_collection.tp.size())
        heads = [config.num_attention_heads] + [config.num_query_groups] * config.num_kv_projections
        self.qkv_adapters = (
            nn.ModuleList(
                LowRank(config, place, 2 * hidden, (config.kv_channels,), count) for count in heads
            )
            if config.shared_block_attention_adapters
            else None
        )
        has_adapters = config.shared_block_adapter_rank is not None
        self.mlp_adapter = LowRank(config, place, hidden, (ffn, ffn)) if has_adapters else None
        self.linear = ReplicatedLinear(config, hidden, hidden)
        self.norm = build_norm(config)
        self.mamba = (Mamba1Mixer if is_mamba1 else Mamba2Mixer)(config, place)

    def cache_requirements(self) -> LayerCache:
        """Describe the keys and values of this run of the block, and its Mamba mixer's states."""
        full_heads = self.config.num_query_groups
        kv = KVShape(self.num_groups, self.config.kv_channels, full_heads=full_heads)
        return LayerCache(kv=kv, states=self.mamba.cache_requirements().states)

    def forward(
        self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, [T, hidden] -> (output [T, hidden], bias or None)."""
        if self.block is not None:
            inputs.shared_blocks[self.block_number] = self.block
        block = inputs.shared_blocks[self.block_number]
        shared_Th = block(
            torch.cat((hidden_Th, inputs.embedding_Th), -1),
            context,
            self.layer_number,
            self.qkv_adapters,
            self.mlp_adapter,
        )
        return self.mamba(self.norm(hidden_Th + self.linear(shared_Th)), context)


class SharedBlock(nn.Module):
    """mlp(norm(attention(norm(x)))), from twice the hidden size and without residuals."""

    def __init__(self, config: HybridConfig, place: MixerPlace):
        super().__init__()
        self.activation = config.activation_func
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.input_layernorm = build_norm(config, 2 * hidden)
        self.self_attention = AttentionMixer(config, place, input_size=2 * hidden)
        self.pre_mlp_layernorm = build_norm(config)
        self.linear_fc1 = build_input_projection(
            place.submodules.column, config, (ffn, ffn), place.pg_collection
        )
        self.linear_fc2 = build_output_projection(place, config, ffn)

    def forward(
        self,
        x_Tc: Tensor,
        context: MixerContext,
        layer_number: int,
        qkv_adapters: nn.ModuleList | None,
        mlp_adapter: LowRank | None,
    ) -> Tensor:
        """Run the block, [T, 2 * hidden] -> [T, hidden].

        Args:
            layer_number: of the layer that runs it; each layer has its own keys and values.
            qkv_adapters: that layer's additions to queries, keys and values.
            mlp_adapter: that layer's addition to the gate and value of the MLP, if it has one.
        """
        x_Tc = self.input_layernorm(x_Tc)
        attention = self.self_attention
        mixed, _ = attention.linear_qkv(x_Tc)
        if qkv_adapters is not None:
            groups = [
                adapter(x_Tc).unflatten(-1, (attention.num_groups, -1)) for adapter in qkv_adapters
            ]
            mixed = mixed + torch.cat(groups, -1).flatten(1)
        attended, _ = attention.attend(mixed, context, layer_number)
        hidden_Th = self.pre_mlp_layernorm(attended)
        inner, _ = self.linear_fc1(hidden_Th)
        if mlp_adapter is not None:
            inner = inner + mlp_adapter(hidden_Th)
        gate, value = inner.chunk(2, -1)
        return self.linear_fc2(self.activation(gate) * value)[0]


class LowRank(nn.Module):
    """up(down(x)), a product of two thin matrices; `up` is cut as the projection that it adds to.

    Args:
        sections: full sizes of the outputs, concatenated, each cut separately.
        num_heads: how often the sections are repeated, for ranks with an equal part each, or
            sharing one with as many others; None means once, and all ranks have a part.
    """

    def __init__(
        self,
        config: HybridConfig,
        place: MixerPlace,
        input_size: int,
        sections: tuple[int, ...],
        num_heads: int | None = None,
    ):
        super().__init__()
        rank, repeats, copies = config.shared_block_adapter_rank, 1, None
        if num_heads is not None:
            tp_size = place.pg_collection.tp.size()
            repeats = min(tp_size, num_heads)
            sections = tuple(size * num_heads // repeats for size in sections)
            copies = (tp_size // repeats,) * len(sections)
        self.down = ReplicatedLinear(config, input_size, rank)
        self.up = build_input_projection(
            place.submodules.column,
            config,
            sections,
            place.pg_collection,
            copies=copies,
            repeats=repeats,
            input_size=rank,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., input_size] -> [..., this rank's part of the outputs]."""
        return self.up(self.down(x))[0]
