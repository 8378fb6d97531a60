"""What Gemma 3n has around its layers: several residual streams (AltUp, arXiv 2301.13310), and a
product of low rank next to a layer (LAuReL, arXiv 2411.07501). All is replicated on all ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_specs import build_norm
from megatron_hybrid.models.mixers.base import StackInputs
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.mixers.projections import ReplicatedLinear, replicated_weight
from megatron_hybrid.ops.checks import compute_dtype


class Laurel(nn.Module):
    """x + norm(right(left(x))), of rank `config.residual_rank`."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        hidden, rank = config.hidden_size, config.residual_rank
        self.linear_left = ReplicatedLinear(config, hidden, rank)
        self.linear_right = ReplicatedLinear(config, rank, hidden)
        self.post_laurel_norm = build_norm(config)

    def forward(self, x_Th: Tensor) -> Tensor:
        """Add the normed low-rank projection of x, [T, hidden] -> [T, hidden]."""
        low_Tr = self.linear_left(x_Th.to(self.post_laurel_norm.weight.dtype))
        return x_Th + self.post_laurel_norm(self.linear_right(low_Tr))


class StreamUpdate(nn.Module):
    """Some layers compute the first stream, from what is predicted of it; the result corrects what
    is predicted of all. The last layer takes the corrected one, scaled, and what it gives is added
    to the others."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        hidden, streams = config.hidden_size, config.num_residual_streams
        self.router_norm = build_norm(config)
        self.modality_router = ReplicatedLinear(config, hidden, streams)
        self.prediction_coefs = ReplicatedLinear(config, streams, streams**2)
        self.correction_coefs = ReplicatedLinear(config, streams, streams)
        self.correct_output_scale = replicated_weight(config, hidden)

    def forward(
        self,
        layers: Iterable[nn.Module],
        streams_STh: Tensor,
        context: MixerContext,
        inputs: StackInputs,
        sums: object = None,
    ) -> Tensor:
        """Update the streams, [S, T, hidden] -> [S, T, hidden], by layers with these arguments."""
        *layers, last = layers
        factors_TS = self.prediction_coefs(self._routed(streams_STh[0]))
        factors_SST1 = factors_TS.T.unflatten(0, (len(streams_STh), -1)).unsqueeze(-1)
        predicted_STh = streams_STh.to(compute_dtype(streams_STh))
        # Sums over few streams, not products of matrices: a row's bits do not depend on others.
        for stream_Th, factors_ST1 in zip(streams_STh, factors_SST1.unbind(1)):
            predicted_STh = predicted_STh + factors_ST1.to(predicted_STh.dtype) * stream_Th
        predicted_STh = predicted_STh.to(streams_STh.dtype)
        first_Th = predicted_STh[0]
        for layer in layers:
            first_Th = layer(first_Th, context, inputs)
        factors_ST1 = (self.correction_coefs(self._routed(first_Th)) + 1.0).T.unsqueeze(-1)
        streams_STh = predicted_STh + factors_ST1 * (first_Th - predicted_STh[0])
        added_Th = last(streams_STh[0] * self.correct_output_scale, context, inputs)
        return torch.cat((streams_STh[:1], streams_STh[1:] + added_Th))

    def _routed(self, x_Th: Tensor) -> Tensor:
        routed_TS = self.modality_router(self.router_norm(x_Th) / x_Th.shape[-1])
        return routed_TS.to(compute_dtype(x_Th)).tanh().to(x_Th.dtype)


class ResidualStreams(nn.Module):
    """The `config.num_residual_streams` of a model: how they begin, end, and are updated by each of
    `num_updates` groups of layers."""

    def __init__(self, config: HybridConfig, num_updates: int):
        super().__init__()
        hidden, others = config.hidden_size, range(config.num_residual_streams - 1)
        self.projections = nn.ModuleList(ReplicatedLinear(config, hidden, hidden) for _ in others)
        self.unembed_projections = nn.ModuleList(
            ReplicatedLinear(config, hidden, hidden) for _ in others
        )
        self.updates = nn.ModuleList(StreamUpdate(config) for _ in range(num_updates))

    def split(self, hidden_Th: Tensor) -> Tensor:
        """Split [T, hidden] -> [S, T, hidden]."""
        others = (_as_large(project(hidden_Th), hidden_Th) for project in self.projections)
        return torch.stack([hidden_Th, *others])

    def merge(self, streams_STh: Tensor) -> Tensor:
        """Merge [S, T, hidden] -> [T, hidden]."""
        first_Th, *others = streams_STh
        projected = (project(x_Th) for project, x_Th in zip(self.unembed_projections, others))
        total_Th = sum((_as_large(x_Th, first_Th) for x_Th in projected), first_Th)
        return total_Th / len(streams_STh)


def _as_large(x_Th: Tensor, like_Th: Tensor) -> Tensor:
    """Scale x to the mean square of another tensor, row by row."""
    wide_Th, wide_like_Th = (each.to(compute_dtype(each)) for each in (x_Th, like_Th))
    size_T1, like_T1 = (each.square().mean(-1, True) for each in (wide_Th, wide_like_Th))
    # Rows of padding may be 0, where a square root has no gradient.
    factor_T1 = (like_T1.clamp(min=1e-30) / size_T1.clamp(min=1e-5)).sqrt()
    return (wide_Th * factor_T1).to(x_Th.dtype)
