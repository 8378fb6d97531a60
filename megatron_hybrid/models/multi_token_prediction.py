"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the parts after `/` in a
layer pattern, with the parameters of core's MultiTokenPredictionBlock.

In training the k-th part predicts, from the hidden states of the one before it and the embedding of
the k-th next token, the token after that. Serving drafts with the first, or runs none of them
(docs/guides/speculation.md).
"""

import copy

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_stack import HybridStack
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import LayerCache, StackInputs
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import LocalColumnLinear, build_input_projection
from megatron_hybrid.models.mixers.router import Router
from megatron_hybrid.models.sharding.collectives import gather_last_dim, split_rows


class PredictionLayers(MegatronModule):
    """norm(layers(projection([norm(embedding), norm(hidden)]))).

    Args:
        config: of the model.
        symbols: of the layers.
        pg_collection: process groups.
    """

    def __init__(self, config: HybridConfig, symbols: str, pg_collection: ProcessGroupCollection):
        super().__init__(config)
        self.tp_group = pg_collection.tp
        hidden = config.hidden_size
        self.enorm, self.hnorm, self.final_layernorm = (build_norm(config) for _ in range(3))
        self.eh_proj = build_input_projection(
            LocalColumnLinear, config, (hidden,), pg_collection, input_size=2 * hidden
        )
        configs = [config.for_prediction(symbol) for symbol in symbols]
        self.mtp_model_layer = HybridStack(
            config, symbols, configs, pg_collection, post_process=False
        )

    @property
    def transformer_layer(self) -> HybridStack:
        """The layers, by the name that core's schedules have for them in 0.16."""
        return self.mtp_model_layer

    def forward(self, hidden_Th: Tensor, embedding_Th: Tensor, context: MixerContext) -> Tensor:
        """Run a head, [T, hidden] twice -> [T, hidden]; rows split by sequence parallelism."""
        x_Th = self._input(hidden_Th, embedding_Th)
        x_Th = self.mtp_model_layer(x_Th, context, StackInputs(None))
        return self.final_layernorm(x_Th.to(embedding_Th.dtype))

    def cache_requirements(self) -> list[LayerCache]:
        """Describe what each layer keeps between calls."""
        return [layer.cache_requirements() for layer in self.mtp_model_layer.layers]

    def keep(self, hidden_Th: Tensor, embedding_Th: Tensor, context: MixerContext) -> None:
        """Run `forward` up to the last layer that keeps something, for what the layers keep."""
        kept = [n for n, cache in enumerate(self.cache_requirements()) if cache != LayerCache()]
        if not kept:
            return
        x_Th = self._input(hidden_Th, embedding_Th)
        for layer in self.mtp_model_layer.layers[: kept[-1] + 1]:
            x_Th = layer(x_Th, context, StackInputs(None))

    def _input(self, hidden_Th: Tensor, embedding_Th: Tensor) -> Tensor:
        """Compute the layers' input from hidden states and embeddings."""
        config = self.config
        x_Tc = torch.cat((self.enorm(embedding_Th), self.hnorm(hidden_Th)), -1)
        x_Th = gather_last_dim(self.eh_proj(x_Tc)[0], self.tp_group)
        if config.sequence_parallel:
            x_Th = split_rows(x_Th, self.tp_group)
        return x_Th.float() if config.fp32_residual_connection else x_Th


class MultiTokenPrediction(MegatronModule):
    """All parts of a model.

    Args:
        config: of the model.
        pg_collection: process groups.
    """

    def __init__(self, config: HybridConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config)
        parts = config.pattern.predictions
        self.num_parts = len(parts)
        if config.mtp_use_repeated_layer:
            config = _counted_once(config, len(parts))
            parts = parts[:1]
        self.layers = nn.ModuleList(
            PredictionLayers(config, symbols, pg_collection) for symbols in parts
        )
        for number, part in enumerate(self.layers, config.num_layers + 1):
            for module in part.modules():
                if isinstance(module, Router):
                    module.set_layer_number(number)
        self.losses: Tensor | None = None
        """Mean loss of each part in the last forward pass of training, [parts] fp32."""

    @property
    def parts(self) -> list[PredictionLayers]:
        """List the parts in order of use; with `mtp_use_repeated_layer` all are the same one."""
        return list(self.layers) * (self.num_parts // len(self.layers))


def _counted_once(config: HybridConfig, uses: int) -> HybridConfig:
    """Copy the config for layers that are used several times in a forward pass, so that the losses
    that balance experts count once, as in core."""
    config, coefficient = copy.copy(config), config.moe_aux_loss_coeff
    if isinstance(coefficient, list):
        config.moe_aux_loss_coeff = [one / uses for one in coefficient]
    else:
        config.moe_aux_loss_coeff = coefficient / uses
    return config


def next_rows(x_T: Tensor, ends: Tensor) -> Tensor:
    """Replace each row by its next one, and the last one of a sequence by 0."""
    next_T = F.pad(x_T[1:], (0, 1))
    next_T[ends] = 0
    return next_T
