"""The residual stack: layers of any kind, one mixer each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.models.layer_specs import build_norm, get_layer_spec
from megatron_hybrid.models.mixers.base import LayerCache, MixerPlace, StackInputs, rank_generator
from megatron_hybrid.models.mixers.mixer_context import MixerContext
from megatron_hybrid.models.norms import is_plain
from megatron_hybrid.models.recompute import is_selected, recompute, recompute_if, recompute_output
from megatron_hybrid.models.residual_streams import Laurel, ResidualStreams
from megatron_hybrid.models.sharding.collectives import gather_rows, split_rows

layer_watcher: ContextVar[Callable[[str, nn.Module], None] | None]
layer_watcher = ContextVar("layer_watcher", default=None)
"""Called with the prefix of its parameters' names and each layer, as soon as it is made."""


class ResidualSums:
    """Adds the outputs of layers to the residual stream. Where a norm reads the sum next, both are
    one launch on a GPU.

    Args:
        norms: of the sums to come, in order.
    """

    def __init__(self, norms: Iterable[nn.Module | None] = ()):
        self._norms = iter(norms)
        self._sum_Th: Tensor | None = None
        self._normed_Th: Tensor | None = None

    def add(self, hidden_Th: Tensor, output_Th: Tensor) -> Tensor:
        """Return hidden + output, [T, hidden]."""
        norm = next(self._norms, None)
        if norm is None:
            return hidden_Th + output_Th
        self._normed_Th, self._sum_Th = norm.of_sum(hidden_Th, output_Th)
        return self._sum_Th

    def normed(self, norm: nn.Module, hidden_Th: Tensor) -> Tensor:
        """Return norm(hidden), [T, hidden]. A hook may have replaced a sum by another tensor."""
        return self._normed_Th if hidden_Th is self._sum_Th else norm(hidden_Th)


class HybridLayer(MegatronModule):
    """stream_multiplier * x + dropout(residual_multiplier * post_norm(mixer(norm(x)))), times the
    layer scalar; norm(x) in place of x where `norm_placement` says so, and with `residual_rank` x +
    `Laurel`(norm(x)).

    Args:
        config: configuration of the layer.
        symbol: of the layer pattern.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups.
    """

    def __init__(
        self,
        config: HybridConfig,
        symbol: str,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        kind, spec = LAYER_KINDS[symbol], get_layer_spec(config, symbol)
        self.norm_name, self.mixer_name = kind.norm_name, kind.mixer_name
        """Their names in a checkpoint."""
        norm, post_norm = (
            each(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
            for each in (spec.norm, spec.post_norm)
        )
        self.tp_group = pg_collection.tp
        splits_rows = spec.mixer.splits_rows
        self.gathers_rows = config.sequence_parallel and not splits_rows
        """Whether the mixer gets the rows of all ranks, of which the layer has its own."""
        mixer = spec.mixer(
            config if splits_rows else config.with_all_rows(),
            MixerPlace(spec.submodules, layer_number, pg_collection),
            **kind.params,
        )
        self.recomputes_mixer = is_selected(config, spec.mixer.recompute_name)
        # With the mixer it is recomputed anyway, and its hooks would keep what the mixer saves.
        self.recomputes_norm = (
            is_selected(config, "layernorm")
            and not self.recomputes_mixer
            and not isinstance(norm, IdentityOp)
        )
        self.add_module(self.norm_name, norm)
        self.add_module(self.mixer_name, mixer)
        self.post_layernorm = post_norm
        self.laurel = Laurel(config) if config.residual_rank else None
        scalar = torch.ones(1, dtype=config.params_dtype) if config.layer_scalar else None
        self.register_buffer("layer_scalar", scalar)

    def cache_requirements(self) -> LayerCache:
        """Return the state that the mixer keeps between calls."""
        return getattr(self, self.mixer_name).cache_requirements()

    def forward(
        self,
        hidden_Th: Tensor,
        context: MixerContext,
        inputs: StackInputs,
        sums: ResidualSums | None = None,
    ) -> Tensor:
        """Run the layer, [T, hidden] -> [T, hidden]; this rank's rows under sequence parallelism.
        With `fp32_residual_connection` both are fp32, and the mixer runs in `params_dtype`."""
        sums, stream_Th = sums or ResidualSums(), hidden_Th
        # The mixer norms it again, by the same launch: it may be computed again on its own.
        if self.config.norm_placement == "stream":
            stream_Th = sums.normed(self._modules[self.norm_name], hidden_Th)
        if self.laurel is not None:
            normed_Th = sums.normed(self._modules[self.norm_name], hidden_Th)
            stream_Th = stream_Th + self.laurel(normed_Th)
        output, bias = recompute_if(
            self.recomputes_mixer, self, self._mix, hidden_Th, context, inputs, sums
        )
        if bias is not None:
            output = output + bias
        if self.gathers_rows:
            output = split_rows(output, self.tp_group)
        output = self.post_layernorm(output)
        if self.config.fp32_residual_connection:
            output = output.float()
        if self.config.residual_multiplier != 1.0:
            output = output * self.config.residual_multiplier
        if self.training and self.config.hidden_dropout:
            with rank_generator(self.config.sequence_parallel):
                output = F.dropout(output, self.config.hidden_dropout)
        if self.config.stream_multiplier != 1.0:
            stream_Th = stream_Th * self.config.stream_multiplier
        hidden_Th = sums.add(stream_Th, output)
        return hidden_Th if self.layer_scalar is None else hidden_Th * self.layer_scalar

    def _mix(
        self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs, sums: ResidualSums
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer on the normed input; return its output and its bias."""
        # From the dict: access to a module as an attribute takes longer than a small kernel.
        norm, mixer = self._modules[self.norm_name], self._modules[self.mixer_name]
        extra = (inputs,) if mixer.takes_stack_inputs else ()
        if self.config.fp32_residual_connection:
            hidden_Th = hidden_Th.to(self.config.params_dtype)
        x_Th = normed_Th = sums.normed(norm, hidden_Th)
        if self.gathers_rows:
            x_Th = gather_rows(x_Th, self.tp_group, whole_gradient=True)
        if not self.recomputes_norm or not self.training or not torch.is_grad_enabled():
            return mixer(x_Th, context, *extra)
        with recompute_output(normed_Th, norm, hidden_Th):
            return mixer(x_Th, context, *extra)


class HybridStack(MegatronModule):
    """The layers of one pipeline stage, and after the last stage's the final norm.

    Args:
        config: configuration of the model.
        layer_type_list: symbols of the layers of this stage; an attribute, as in core.
        layer_configs: of each layer of this stage.
        pg_collection: process groups.
        post_process: whether this stage is the last one.
    """

    def __init__(
        self,
        config: HybridConfig,
        layer_type_list: Sequence[str],
        layer_configs: Sequence[HybridConfig],
        pg_collection: ProcessGroupCollection,
        post_process: bool,
    ):
        super().__init__(config)
        self.layer_type_list = list(layer_type_list)
        self.layers = nn.ModuleList()
        for i, (symbol, own) in enumerate(zip(self.layer_type_list, layer_configs)):
            layer = HybridLayer(own, symbol, i + 1, pg_collection)
            self.layers.append(layer)
            if watch := layer_watcher.get():
                watch(f"decoder.layers.{i}.", layer)
        groups = self.layer_type_list.count("P")
        self.streams = ResidualStreams(config, groups) if config.num_residual_streams else None
        self.recomputed_layers = self._recomputed_layers()
        """Numbers of `_steps`, from the first one on, that are recomputed together."""
        self.final_norm = build_norm(config) if post_process else None

    def _recomputed_layers(self) -> list[int]:
        config, layers = self.config, len(self._steps())
        if config.recompute_granularity != "full":
            return []
        size = config.recompute_num_layers
        if config.recompute_method == "block":
            return [1] * min(size, layers)
        return [min(size, layers - start) for start in range(0, layers, size)]

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Tell core's inference configs the shapes of the first Mamba-2 or Gated DeltaNet layer on
        this rank: of the last inputs of the convolution, [C, K], and of the state, [H, P, N]; None
        if the stage has no such layer."""
        for symbol, layer in zip(self.layer_type_list, self.layers):
            if symbol in "MG":
                tail, state = layer.cache_requirements().states
                channels, width = tail.shape  # core keeps the present input, too
                return (channels, width + 1), state.shape
        return None

    def forward(self, hidden_Th: Tensor, context: MixerContext, inputs: StackInputs) -> Tensor:
        """Run the stack, [T, hidden] -> [T, hidden], normed where this is the last stage; this
        rank's rows under sequence parallelism."""
        layers = self._steps()
        if self.streams is not None:
            hidden_Th = self.streams.split(hidden_Th)
        if self.training and torch.is_grad_enabled():
            for size in self.recomputed_layers:
                first, layers = layers[:size], layers[size:]
                hidden_Th = recompute(_run, first, hidden_Th, context, inputs)
        sums = ResidualSums(self._norms_of_sums(layers))
        hidden_Th = _run(layers, hidden_Th, context, inputs, sums)
        if self.streams is not None:
            hidden_Th = self.streams.merge(hidden_Th)
        if self.final_norm is None:
            return hidden_Th
        if self.config.fp32_residual_connection:
            hidden_Th = hidden_Th.to(self.config.params_dtype)
        return sums.normed(self.final_norm, hidden_Th)

    def _steps(self) -> list[Callable[..., Tensor]]:
        """Return what the residual stream goes through: the layers, or for several streams groups
        of layers, each up to a layer P."""
        if self.streams is None:
            return list(self.layers)
        layers, groups = iter(self.layers), "".join(self.layer_type_list).split("P")
        return [
            partial(update, [*islice(layers, len(group) + 1)])
            for update, group in zip(self.streams.updates, groups)
        ]

    def _norms_of_sums(self, layers: Sequence[Callable]) -> Iterator[nn.Module | None]:
        """Find each layer's norm that reads its residual sum, where one launch may do both."""
        if torch.is_grad_enabled() or self.config.fp32_residual_connection or self.streams:
            return
        norms = [layer._modules[layer.norm_name] for layer in layers[1:]]
        for layer, norm in zip(layers, [*norms, self.final_norm]):
            yield norm if is_plain(norm) and layer.layer_scalar is None else None


def _run(
    layers: Iterable[Callable[..., Tensor]],
    hidden_Th: Tensor,
    context: MixerContext,
    inputs: StackInputs,
    sums: ResidualSums | None = None,
) -> Tensor:
    """Run one layer after the other, [T, hidden] -> [T, hidden]."""
    for layer in layers:
        hidden_Th = layer(hidden_Th, context, inputs, sums)
    return hidden_Th
