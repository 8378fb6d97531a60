"""The language model: embedding, hybrid stack, output layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor, nn

from megatron_hybrid.models.batch_layout import (
    batch_layout,
    check_attention_mask,
    check_padding_mask,
    check_position_ids,
    row_padding,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_stack import HybridStack
from megatron_hybrid.models.layer_pattern import SHARED_BLOCKS
from megatron_hybrid.models.layer_specs import get_mixer
from megatron_hybrid.models.mixers.base import LayerCache, StackInputs
from megatron_hybrid.models.mixers.mixer_context import MixerContext, UncachedContext
from megatron_hybrid.models.mixers.per_layer_input import PerLayerEmbedding, rounded
from megatron_hybrid.models.mixers.projections import LocalColumnLinear
from megatron_hybrid.models.multi_token_prediction import MultiTokenPrediction, next_rows
from megatron_hybrid.models.packed_weight import require_unpacked
from megatron_hybrid.models.parameter_names import canonical_name, respell
from megatron_hybrid.models.recompute import check_recompute_modules, recompute
from megatron_hybrid.models.sharding.collectives import gather_last_dim, gather_rows, split_rows
from megatron_hybrid.models.sharding.parallel_setup import check_process_groups, process_groups
from megatron_hybrid.models.sharding.sharded_state import sharded_state_dict
from megatron_hybrid.models.sharding.stage_copies import StageCopies
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel
from megatron_hybrid.ops.checks import join
from megatron_hybrid.ops.linear import full_rows
from megatron_hybrid.utils.other_names import names_arguments, names_attributes
from megatron_hybrid.utils.out_of_memory import is_lack_of_memory

NO_LABEL = -100
"""Label of tokens without a label, as in torch's `cross_entropy` and transformers."""
LOSS_BYTES = 512 << 20
"""Memory of the fp32 logits that a loss is computed from at a time: a product of some thousand rows
is as fast as one of all."""
NO_MEMORY = (
    "the model's weights have no memory: an engine has given it back, whose reacquire_weights() "
    "gets it again, or they are on torch's device meta: load or build them on 'cpu' or 'cuda'"
)
"""What an error says where not `HybridModel.has_memory`."""


if TYPE_CHECKING:
    # megatron-core has no py.typed, so that a type checker does not see that its module is torch's.
    class _LanguageModule(LanguageModule, nn.Module): ...

else:
    _LanguageModule = LanguageModule


@names_attributes
class HybridModel(_LanguageModule):
    """A decoder whose layers are the symbols of `config.layer_pattern`.

    Inside, tokens lie flat, [T, hidden], sequence after sequence: a batch of equal sequences, a
    packed batch and a ragged inference batch are one case. Parameter names are those of
    megatron-core's MambaModel (0.16) and HybridModel (0.19).

    Args:
        config: the architecture.
        pg_collection: process groups, `tp` and `pp` among them, and with `ep`, `expt_tp` and
            `tp_ep` where experts are split in another way; `cp` of one rank.
        pre_process: whether this pipeline stage embeds.
        post_process: whether this pipeline stage computes logits.

    Raises:
        ValueError: the process groups do not fit the config, or split what is not supported.
    """

    config: HybridConfig

    def _set_attention_backend(self) -> None:
        """Set no variables of the environment, as core does for Transformer Engine's attention,
        which this model does not have."""

    def __init__(
        self,
        config: HybridConfig,
        pg_collection: ProcessGroupCollection,
        pre_process: bool = True,
        post_process: bool = True,
    ):
        check_process_groups(config, pg_collection)
        super().__init__(config=config, pg_collection=pg_collection)
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights
        self.model_type = ModelType.encoder_or_decoder  # core's pipeline schedules read it
        self.vocab_size = config.vocab_size
        self.input_tensor: Tensor | None = None
        self.position_embedding_type = config.position_embedding_type
        self.max_sequence_length = None  # no table of positions ends it
        self.vp_stage = None
        tp_size = pg_collection.tp.size()
        padded_vocab_size = -(-config.vocab_size // tp_size) * tp_size
        vocabulary_cut = Cut(0, (padded_vocab_size,), tp_size, unpadded_size=config.vocab_size)

        stages = config.pattern.stages(pg_collection.pp.size())
        stage = pg_collection.pp.rank()
        self.layer_offset = sum(map(len, stages[:stage]))
        """Layers of the pipeline stages before this one."""
        # The layers of a shared block see the embedding too, and it is on the first stage.
        passes_embedding = any(set(SHARED_BLOCKS) & set(symbols) for symbols in stages[1:])
        self.boundary_width = config.hidden_size * (2 if passes_embedding else 1)
        """Width of the tensors [s, b, boundary_width] between pipeline stages: hidden states, and
        next to them the word embedding if layers share a block after the first stage."""
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config.with_all_rows(),
                vocab_size=padded_vocab_size,
                max_sequence_length=0,  # of learned positions, which hybrids do not have
                position_embedding_type=config.position_embedding_type,
                tp_group=pg_collection.tp,
            )
            mark_tensor_parallel(self.embedding.word_embeddings.weight, vocabulary_cut)
            self.per_layer_embedding = (
                PerLayerEmbedding(config) if "P" in config.pattern.symbols else None
            )
        symbols = stages[stage]
        configs = [config.for_layer(self.layer_offset + i) for i in range(1, len(symbols) + 1)]
        self._shared_kv_layers = {own.kv_source_layer for own in configs} - {None}
        check_recompute_modules(config, {symbol: get_mixer(symbol) for symbol in config.symbols})
        self.decoder = HybridStack(config, symbols, configs, pg_collection, post_process)
        if config.pattern.predictions:
            # Core asks whether a model has the attribute.
            self.mtp = MultiTokenPrediction(config, pg_collection)
        if post_process:
            self.output_layer = LocalColumnLinear(
                config.hidden_size,
                padded_vocab_size,
                config=config.with_all_rows(),
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                disable_grad_reduce=config.sequence_parallel,  # by the gather of the rows
                gather_output=False,
                skip_weight_param_allocation=self.share_embeddings_and_output_weights
                and pre_process,
                tp_group=pg_collection.tp,
            )
            if self.output_layer.weight is not None:
                mark_tensor_parallel(self.output_layer.weight, vocabulary_cut)
        self.setup_embeddings_and_output_layer()
        self.stage_copies = StageCopies(self)
        """Parameters of this stage that other stages hold too."""
        self.register_load_state_dict_pre_hook(respell)
        self._kept_in_fp32 = [
            (module, name)
            for module in self.modules()
            for name, tensor in (module._parameters | module._buffers).items()
            if tensor is not None and tensor.dtype == torch.float32 != config.params_dtype
        ]
        self.packed_source: Any = None
        """The `PackedSource` of packed weights; None if there are none."""
        self.num_weight_changes = 0
        """Number of calls that change weights: `train()`, `load_state_dict`."""
        self.register_load_state_dict_post_hook(lambda model, keys: model._note_weight_change())
        self._drawn: tuple[int, list[int]] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HybridModel:
        """See torch, where `bfloat16`, `half` and `to` come by here. What a model of 16-bit
        `params_dtype` was built with in fp32 stays fp32: decays of recurrent layers, routers with
        their biases and counts. core's Float16Module would round them, and counts of more than 256
        tokens stand still in bf16."""
        kept = set()
        for module, name in self._kept_in_fp32:
            tensor = getattr(module, name)
            kept |= {id(tensor), id(tensor.grad)}

        def converted(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept and result.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(result.device)
            return result

        return super()._apply(converted, recurse)

    def train(self, mode: bool = True) -> HybridModel:
        """Train, or not, as in torch. An engine that serves the model treats its weights as changed
        from now on."""
        if mode:
            self._note_weight_change()
        return super().train(mode)

    def note_draw(self, seed: int) -> None:
        """Note that torch's generator has drawn the weights with this seed."""
        self._drawn = seed, self._versions()

    @property
    def untouched_seed(self) -> int | None:
        """The seed that the weights were drawn with, of which ranks hold pieces; None if they were
        written since, or come from elsewhere."""
        if self._drawn is None or self._drawn[1] != self._versions():
            return None
        return self._drawn[0]

    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters() if not p.is_inference()]

    def _note_weight_change(self) -> None:
        self.num_weight_changes += 1

    def setup_embeddings_and_output_layer(self) -> None:
        """See core, which copies a tied embedding to the last stage on CUDA devices alone:
        `StageCopies` does it here."""
        is_tied = self.share_embeddings_and_output_weights
        if not is_tied or self.config.pipeline_model_parallel_size == 1:
            super().setup_embeddings_and_output_layer()
        elif self.pre_process or self.post_process:
            self.shared_embedding_or_output_weight().is_embedding_or_output_parameter = True

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the input that core's pipeline schedules received from the previous stage, [s, b,
        boundary_width]."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def stage_input(self, num_tokens: int) -> Tensor:
        """Make room for the output of the previous pipeline stage for one sequence, [s, 1,
        boundary_width]; s is num_tokens, or this rank's part of them (sequence parallelism)."""
        if self.config.sequence_parallel:
            num_tokens //= self.config.tensor_model_parallel_size
        parameter = next(self.parameters())
        shape = num_tokens, 1, self.boundary_width
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=parameter.device)

    def adjust_tensor_shapes(
        self, received: list[tuple[int, ...]], sent: list[tuple[int, ...]]
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Set the width of the tensors between pipeline stages, for the argument
        `adjust_tensor_shapes_fn` of core's schedules, which take a width of hidden_size."""
        width = self.boundary_width
        return (
            [(*shape[:-1], width) for shape in received],
            [(*shape[:-1], width) for shape in sent],
        )

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of the shared blocks over the pipeline stages that hold a copy. Call it
        on all stages after core's `finalize_model_grads`, which sums those of a tied word
        embedding, and before the optimizer."""
        self.stage_copies.sum_gradients()

    def canonical_name(self, name: str) -> str:
        """Return a parameter's name in the whole model; a copy of another stage's parameter has the
        name of that one."""
        return self.stage_copies.name(canonical_name(name, self.layer_offset))

    @property
    def has_memory(self) -> bool:
        """Whether the parameters have their memory, which an engine can give back for a while."""
        parameter = next(self.parameters())
        return not parameter.is_meta and parameter.untyped_storage().nbytes() > 0

    def cache_requirements(self) -> list[LayerCache]:
        """Describe what each layer of this stage keeps between calls; index is layer_number - 1."""
        return [layer.cache_requirements() for layer in self.decoder.layers]

    def prediction_requirements(self) -> list[LayerCache]:
        """Describe the same for the layers of the first MTP head, whose numbers go on from those of
        the model; empty without one."""
        return self.mtp.layers[0].cache_requirements() if hasattr(self, "mtp") else []

    def predict(self, hidden_Th: Tensor, ids_T: Tensor, context: MixerContext) -> Tensor:
        """Run the first MTP head. Normed hidden states `[T, hidden]` of the token before each (the
        model's, or the head's own), and the tokens (int64 `[T]`) become normed hidden states of the
        next tokens, `[T, hidden]`."""
        embedding_Th = self._rounded(self._embed_words(ids_T))
        if not self.config.sequence_parallel:
            return self.mtp.layers[0](hidden_Th, embedding_Th, context)
        tp = self.pg_collection.tp
        rows = split_rows(hidden_Th, tp), split_rows(embedding_Th, tp)
        return gather_rows(self.mtp.layers[0](*rows, context), tp)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: MixerContext | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: MixerContext | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or the loss of each token. Arguments and their order are megatron-core's.

        Attention is causal and positions count from each sequence's start (in inference, from the
        context's start positions). Each row is one sequence, unless `packed_seq_params` give
        others, or `position_ids` or `attention_mask` restart inside of it (GPTDataset's
        `reset_position_ids` and `reset_attention_mask`): then each document is a sequence, and
        recurrent states, convolutions and windows restart too. To find that out, positions and
        masks are read, and on a device a forward waits for them. Without both, or with boundaries
        of `packed_seq_params` in host memory, it does not.

        Args:
            input_ids: [b, s] int64. Packed and in inference: [1, T]. None on later pipeline stages,
                or with a `decoder_input`.
            position_ids: [b, s], [1, s] or [s] int: counted from the start of each row or document.
                Packed: from the start of the row or from each boundary. In inference: those of the
                context.
            attention_mask: [b, 1, s, s] or [1, 1, s, s] bool, True = not seen: the causal mask of
                each row, or the one inside each sequence. In inference: None.
            decoder_input: [s, b, hidden], the input of the first layer in place of the embedding;
                under sequence parallelism this rank's rows, [s / tp, b, hidden].
            labels: [b, s] int64: for each token the next one, as in megatron-core; where it is -100
                the loss is 0.
            inference_context: serves caches and states; given in inference only.
            runtime_gather_output: gather the logits of all tensor-parallel ranks.
            inference_params: an older name of `inference_context`.
            loss_mask: [b, s]: factors of the losses of multi-token prediction (1 if None), and of
                nothing else, as in megatron-core: the caller multiplies the returned losses by it.
            packed_seq_params: boundaries of the sequences in the one row; recurrent states restart
                at each. Rows after the last boundary are padding.
            padding_mask: [b, s] bool, True = padding: tokens that routers leave out of the counts
                and losses that balance experts, as in megatron-core; their outputs are as without.

        Returns:
            With labels, the loss [b, s], fp32. With an inference context, logits [1, n, vocab] of
            the rows chosen by its `last_token_logits(hidden [1, T, hidden])`. Else logits
            [b, s, vocab], or this rank's part of the (padded) vocabulary if they are not gathered.
            A pipeline stage before the last: [s, b, boundary_width]; under sequence parallelism
            this rank's rows, [s / tp, b, boundary_width].

        Raises:
            ValueError: positions, a mask or boundaries that are not supported; documents in rows
                without `packed_seq_params` over several pipeline stages; or under sequence
                parallelism rows that do not divide over the ranks.
        """
        if inference_context is None:
            inference_context = inference_params
        b, s = self._batch_shape(input_ids, labels, decoder_input)
        padding = row_padding(self.config, b, s, inference_context is not None)
        if inference_context is None:
            layout = batch_layout(
                self.config, b, s, padding, packed_seq_params, position_ids, attention_mask
            )
            device = next(self.parameters()).device
            padding_mask_T = check_padding_mask(padding_mask, (b, s))
            if padding_mask_T is not None:
                padding_mask_T = F.pad(padding_mask_T, (0, padding), value=True)
            context = UncachedContext(layout, device, self._shared_kv_layers, padding_mask_T)
        else:
            context = inference_context
        tp, splits_rows = self.pg_collection.tp, self.config.sequence_parallel
        said = (b, s), context.ragged_layout(), inference_context is not None
        check_position_ids(position_ids, *said)
        check_attention_mask(attention_mask, *said)
        if self.pre_process:
            hidden_Th, inputs = self._embed(input_ids, decoder_input, padding)
        else:
            hidden_Th, inputs = self._received(self.input_tensor)
        hidden_Th = self.decoder(hidden_Th, context, inputs)
        predicts = hasattr(self, "mtp") and self.training and torch.is_grad_enabled()
        if predicts and labels is not None:
            hidden_Th = self._attach_predictions(hidden_Th, input_ids, labels, loss_mask, context)
        if not self.post_process:
            if self.boundary_width > self.config.hidden_size:
                embedding_Th = inputs.embedding_Th
                if splits_rows:
                    embedding_Th = split_rows(embedding_Th, tp)
                hidden_Th = torch.cat((hidden_Th, embedding_Th), -1)
            if splits_rows:
                return hidden_Th.view(s // tp.size(), b, -1)
            return hidden_Th.view(b, s, -1).transpose(0, 1).contiguous()
        if splits_rows:
            hidden_Th = gather_rows(hidden_Th, tp)[: b * s]
        if inference_context is not None:
            # Only a context that drafts by it has one.
            if (kept := getattr(inference_context, "prediction", None)) is not None:
                rows = inference_context.previous_hidden(hidden_Th), inputs.embedding_Th
                if splits_rows:
                    rows = tuple(split_rows(one, tp) for one in rows)
                self.mtp.layers[0].keep(*rows, kept)
            rows_nh = inference_context.last_token_logits(hidden_Th.unsqueeze(0))
            return self.compute_logits(rows_nh).unsqueeze(0)
        if labels is not None:
            return self._loss(hidden_Th, labels)
        if runtime_gather_output or tp.size() == 1:
            return self.compute_logits(hidden_Th).view(b, s, -1)
        return self._local_logits(hidden_Th).view(b, s, -1)

    def last_hidden(self, input_ids: Tensor, inference_context: MixerContext) -> Tensor:
        """Compute the normed hidden states [T, hidden] of all rows of a step; `forward` takes those
        that need logits. The model has one pipeline stage, whose ranks do not split rows."""
        hidden_Th, inputs = self._embed(input_ids, None, padding=0)
        return self.decoder(hidden_Th, inference_context, inputs)

    if TYPE_CHECKING:
        # With the arguments of `forward`. Those of torch and megatron-core return Any.
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def _batch_shape(
        self, input_ids: Tensor | None, labels: Tensor | None, decoder_input: Tensor | None
    ) -> tuple[int, int]:
        """Find (b, s) of the tokens. Later stages get at most labels from Megatron's scripts."""
        for tokens in (input_ids, labels):
            if tokens is not None:
                b, s = tokens.shape
                return b, s
        rows_sbh = decoder_input if self.pre_process else self.input_tensor
        if rows_sbh is None:
            raise ValueError("input_ids is None: the first pipeline stage needs tokens.")
        tp_size = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        return rows_sbh.shape[1], rows_sbh.shape[0] * tp_size

    def _embed(
        self, input_ids: Tensor | None, decoder_input: Tensor | None, padding: int
    ) -> tuple[Tensor, StackInputs]:
        """Compute the input of the stack, and what some mixers need in addition to it.

        Args:
            input_ids: [b, s], or None with a decoder_input.
            decoder_input: see `forward`.
            padding: rows to add after all others.
        """
        tp, splits_rows = self.pg_collection.tp, self.config.sequence_parallel
        ids_T = None if input_ids is None else input_ids.flatten()
        if ids_T is not None and padding:
            ids_T = F.pad(ids_T, (0, padding))
        if decoder_input is None:
            hidden_Th = self._embed_words(ids_T)
        else:
            if splits_rows:
                decoder_input = gather_rows(decoder_input, tp, whole_gradient=True)
            hidden_Th = F.pad(decoder_input.transpose(0, 1).flatten(0, 1), (0, 0, 0, padding))
            if self.config.fp32_residual_connection:
                hidden_Th = hidden_Th.float()
        embedding_Th, per_layer_TJp = self._rounded(hidden_Th), None
        if splits_rows:
            hidden_Th = split_rows(hidden_Th, tp)
        if self.per_layer_embedding is not None:
            if ids_T is None:
                raise ValueError(
                    "input_ids is None, but the layers P of layer_pattern embed the tokens again. "
                    "Pass input_ids with decoder_input."
                )
            if splits_rows:
                ids_T = ids_T.chunk(tp.size())[tp.rank()]
            per_layer_TJp = self.per_layer_embedding(ids_T, self._rounded(hidden_Th))
        return hidden_Th, StackInputs(embedding_Th, per_layer_TJp)

    def _embed_words(self, ids_T: Tensor) -> Tensor:
        """Look up the word embedding of all rows, [T, hidden]."""
        # One row of T tokens: core's [s, b, h] then lies in sequence order.
        hidden_Th = self.embedding(ids_T.unsqueeze(0), None).squeeze(1)
        if (factor := self.config.embedding_multiplier) != 1.0:
            if self.config.round_embedding_multiplier:
                factor = rounded(factor, self.config.params_dtype)
            hidden_Th = hidden_Th * factor
        return hidden_Th

    def _attach_predictions(
        self,
        hidden_Th: Tensor,
        input_ids: Tensor | None,
        labels: Tensor,
        loss_mask: Tensor | None,
        context: UncachedContext,
    ) -> Tensor:
        """Return the same hidden states; their backward pass adds the gradients of MTP heads'
        losses: of the mean times `mtp_loss_scaling_factor` over the number of heads, as in core."""
        if input_ids is None:
            raise ValueError(
                "input_ids is None, but multi-token prediction (/ in layer_pattern) embeds the "
                "tokens again. Pass input_ids with decoder_input."
            )
        layout = context.ragged_layout()
        tp, splits_rows = self.pg_collection.tp, self.config.sequence_parallel
        ids_T, labels_T, num_rows = input_ids.flatten(), labels.flatten(), labels.numel()
        mask_T = (labels_T != NO_LABEL).float()
        mask_T[layout.num_tokens :] = 0.0
        if loss_mask is not None:
            mask_T = mask_T * loss_mask.flatten()
        ends = torch.tensor(layout.cu_seqlens[1:], device=ids_T.device) - 1
        num_tokens, attached, means = mask_T.sum(), hidden_Th, []
        for part in self.mtp.parts:
            ids_T, labels_T, mask_T = (next_rows(one, ends) for one in (ids_T, labels_T, mask_T))
            padded_T = F.pad(ids_T, (0, layout.num_rows - num_rows))
            embedding_Th = self._rounded(self._embed_words(padded_T))
            if splits_rows:
                embedding_Th = split_rows(embedding_Th, tp)
            own = UncachedContext(layout, labels.device, (), context.padding_mask_T)
            rows_Th = hidden_Th = part(hidden_Th, embedding_Th, own)
            if splits_rows:
                rows_Th = gather_rows(rows_Th, tp)[:num_rows]
            losses_T = self._loss(rows_Th, labels_T) * mask_T
            count = mask_T.sum().clamp(min=1e-6)  # weights may be below 1
            scale = self.config.mtp_loss_scaling_factor / self.mtp.num_parts / count
            if self.config.calculate_per_token_loss:
                scale = scale * num_tokens  # by which core divides all gradients
            attached = MTPLossAutoScaler.apply(attached, losses_T * scale)
            means.append((losses_T.sum() / count).detach())
        self.mtp.losses = torch.stack(means)
        return attached

    def _received(self, tensor: Tensor) -> tuple[Tensor, StackInputs]:
        """Return the input of this stage's stack, as received from the stage before it."""
        splits_rows = self.config.sequence_parallel
        rows_Tc = (tensor if splits_rows else tensor.transpose(0, 1)).flatten(0, 1)
        if self.boundary_width == self.config.hidden_size:
            return rows_Tc, StackInputs(None)
        hidden_Th, embedding_Th = rows_Tc.chunk(2, -1)
        if splits_rows:
            embedding_Th = gather_rows(embedding_Th, self.pg_collection.tp, whole_gradient=True)
        return hidden_Th, StackInputs(self._rounded(embedding_Th))

    def _rounded(self, hidden_Th: Tensor) -> Tensor:
        """Cast the residual stream to the dtype that layers take."""
        if self.config.fp32_residual_connection:
            return hidden_Th.to(self.config.params_dtype)
        return hidden_Th

    def compute_logits(self, hidden_nh: Tensor) -> Tensor:
        """Run the output layer alone: normed hidden states [n, hidden] -> logits [n, vocab].

        Rows are padded on a GPU, as in the layers before: where the bits of a row do not depend on
        other rows, those of its logits do not.
        """
        padded = full_rows(hidden_nh) if hidden_nh.is_cuda else hidden_nh
        logits = gather_last_dim(self._local_logits(padded), self.pg_collection.tp)
        return logits[: len(hidden_nh), : self.vocab_size]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
    ) -> ShardedStateDict:
        """Make the state for core's dist_checkpointing, with the keys of its own hybrid models."""
        if sharded_offsets:
            raise ValueError(f"sharded_offsets is {sharded_offsets}; a whole model has none.")
        require_unpacked(self, "core's distributed checkpoints cannot hold the model")
        return sharded_state_dict(self, prefix, metadata)

    def _local_logits(self, hidden_nh: Tensor) -> Tensor:
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        logits, _ = self.output_layer(hidden_nh, weight=weight)
        if self.config.logits_multiplier != 1.0:
            logits = logits * self.config.logits_multiplier
        if (cap := self.config.final_logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def _loss(self, hidden_Th: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross entropy [b, s] in fp32, of so many rows at a time that their logits
        take at most `LOSS_BYTES`; if those are not all, the backward pass computes logits again."""
        width = -(-self.vocab_size // self.pg_collection.tp.size())
        size = max(1, LOSS_BYTES // (4 * width))
        rows, labels_T = hidden_Th.split(size), labels.reshape(-1).split(size)
        again = len(rows) > 1 and torch.is_grad_enabled()
        losses = [
            recompute(self._losses_of, *part) if again else self._losses_of(*part)
            for part in zip(rows, labels_T, strict=True)
        ]
        return join(losses).view_as(labels)

    def _losses_of(self, hidden_nh: Tensor, labels_n: Tensor) -> Tensor:
        """Compute the cross entropy [n] in fp32."""
        logits = self._local_logits(hidden_nh)
        if self.pg_collection.tp.size() == 1:
            # The same function in one fused pass; core's is written for split vocabularies.
            logits = logits.float()
            return F.cross_entropy(logits, labels_n, reduction="none", ignore_index=NO_LABEL)
        width = logits.shape[-1]
        padding = (self.pg_collection.tp.rank() + 1) * width - self.vocab_size
        if padding > 0:
            # Columns of padding are no tokens.
            column = torch.arange(width, device=logits.device)
            logits = logits.masked_fill(column >= width - padding, -torch.inf)
        loss = self.compute_language_model_loss(labels_n.unsqueeze(0), logits.unsqueeze(1))
        return loss.squeeze(0).masked_fill(labels_n == NO_LABEL, 0.0)


def has_foreign_layers(model: HybridModel) -> bool:
    """Return whether layers come from other packages than this one."""
    mixers = (layer._modules[layer.mixer_name] for layer in model.decoder.layers)
    return any(not type(mixer).__module__.startswith("megatron_hybrid.") for mixer in mixers)


def unwrap(model: object) -> object:
    """Return the model inside of wrappers that have it as `module` (Float16Module,
    DistributedDataParallel of megatron-core and of torch), and of a list of one, as megatron-core
    keeps it. Another object comes back as it is."""
    while True:
        if isinstance(model, list) and len(model) == 1:
            (model,) = model
        elif isinstance(model, nn.Module) and isinstance(
            inner := getattr(model, "module", None), nn.Module
        ):
            model = inner
        else:
            return model


@names_arguments()
def build_hybrid_model(
    config: HybridConfig,
    pg_collection: ProcessGroupCollection | None = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
) -> HybridModel:
    """Build a model with random weights of torch's generator on torch's default device. Without
    `config.perform_initialization` its weights have no values yet, and no generator has moved.

    In one process without megatron-core's process groups, the model gets groups of its own, and
    torch.distributed stays as it is. Over several ranks, core's are set up if the caller has not.

    Args:
        config: the architecture, and the sizes of the parallel groups.
        pg_collection: process groups to use; None means megatron-core's, or those of one process.
        pre_process: whether this pipeline stage embeds; by default the first one does.
        post_process: whether this pipeline stage computes logits; by default the last one does.

    Raises:
        ValueError: the process groups do not fit the config, or split what is not supported.
        ImportError: `config.layer_spec` needs Transformer Engine, which is missing.
        MemoryError: there is no room for the weights.
    """
    groups = process_groups(config, pg_collection)
    if pre_process is None:
        pre_process = groups.pp.rank() == 0
    if post_process is None:
        post_process = groups.pp.rank() == groups.pp.size() - 1
    if config.use_cpu_initialization:
        device = torch.get_default_device()
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    # Some layers draw in any case; weights that are read afterwards move nobody's generators.
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators, not config.perform_initialization):
        if not config.use_cpu_initialization and not get_cuda_rng_tracker().is_initialized():
            names = {"tp_rank": "tp", "ep_rank": "ep", "etp_rank": "expt_tp"}
            ranks = {
                rank: getattr(groups, name).rank()
                for rank, name in names.items()
                if hasattr(groups, name)
            }
            model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31, **ranks)
        try:
            model = HybridModel(config, groups, pre_process, post_process).to(device)
        except Exception as error:
            if not is_lack_of_memory(error):
                raise
            raise MemoryError(
                f"{device} has no room for weights of vocab_size={config.vocab_size}, hidden_size="
                f"{config.hidden_size}: lower them, or raise tensor_model_parallel_size ({error})"
            ) from error
    model.note_draw(torch.initial_seed())
    return model
