"""The residual stack: pre-norm layers of any kind, one mixer each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.mixers.base import LayerCache, MixerContext


@dataclass
class HybridLayerSubmodules:
    """The norm (an identity where the mixer's first projection normalises) and the mixer."""

    norm: ModuleSpec | type
    mixer: ModuleSpec


class HybridLayer(MegatronModule):
    """x + dropout(mixer(norm(x))).

    Args:
        config: configuration of the model.
        submodules: what to build.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups.
        norm_name: what the norm is called in a checkpoint.
        mixer_name: what the mixer is called in a checkpoint.
    """

    def __init__(
        self,
        config: HybridConfig,
        submodules: HybridLayerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        norm_name: str,
        mixer_name: str,
    ):
        super().__init__(config)
        self.norm_name = norm_name
        self.mixer_name = mixer_name
        norm = build_module(
            submodules.norm,
            config=config,
            hidden_size=config.hidden_size,
            eps=config.layernorm_epsilon,
        )
        mixer = build_module(
            submodules.mixer,
            config=config,
            layer_number=layer_number,
            pg_collection=pg_collection,
        )
        self.add_module(norm_name, norm)
        self.add_module(mixer_name, mixer)

    def cache_requirements(self) -> LayerCache:
        """What the mixer needs kept between calls."""
        return getattr(self, self.mixer_name).cache_requirements()

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        norm, mixer = getattr(self, self.norm_name), getattr(self, self.mixer_name)
        output, bias = mixer(norm(hidden_Th), context)
        if bias is not None:
            output = output + bias
        if self.training and self.config.hidden_dropout:
            output = F.dropout(output, self.config.hidden_dropout)
        return hidden_Th + output


class HybridStack(MegatronModule):
    """The layers of one pipeline stage, and after the last stage's the final norm.

    Args:
        config: configuration of the model.
        layer_specs: the layer of each symbol, and the final norm; see `get_hybrid_layer_specs`.
        symbols: this stage's layers.
        pg_collection: process groups.
        post_process: whether this stage is the last one.
    """

    def __init__(
        self,
        config: HybridConfig,
        layer_specs: Mapping[str, ModuleSpec],
        symbols: Sequence[str],
        pg_collection: ProcessGroupCollection,
        post_process: bool,
    ):
        super().__init__(config)
        self.layers = nn.ModuleList(
            build_module(
                layer_specs[symbol], config=config, layer_number=i + 1, pg_collection=pg_collection
            )
            for i, symbol in enumerate(symbols)
        )
        self.final_norm = (
            build_module(
                layer_specs["norm"],
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )
            if post_process
            else None
        )

    def forward(self, hidden_Th: Tensor, context: MixerContext) -> Tensor:
        """[T, hidden] -> [T, hidden], normed where this is the last stage."""
        for layer in self.layers:
            hidden_Th = layer(hidden_Th, context)
        return hidden_Th if self.final_norm is None else self.final_norm(hidden_Th)
