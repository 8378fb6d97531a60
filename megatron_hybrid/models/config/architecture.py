"""The model as a whole: layers, vocabulary, width, embedding and output layer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron_hybrid.models.config.field_group import ModelFields
from megatron_hybrid.utils.validation import Range


@dataclass
class ArchitectureFields(ModelFields):
    """Fields of the model as a whole."""

    layer_pattern: str = ""
    """One symbol per layer, `|` between pipeline stages, `/` before each MTP
    head; see `models/layer_pattern.py`."""

    mtp_use_repeated_layer: bool = False
    """Use the layers of the first MTP head as those of all heads."""

    layer_overrides: dict[str | int, dict[str, Any]] = field(default_factory=dict)
    """Fields that differ in some layers: by layer symbol, or by layer number (from 1, through the
    whole model; it wins over the symbol): `{"W": {"rotary_base": 1e4}, "7": {"qk_layernorm":
    False}}`. Every field of a layer may be overridden, fields of the whole model may not. A default
    that depends on another field, such as mamba_num_heads on mamba_head_dim, is computed from the
    model's value: to override either for a layer, set both."""

    vocab_size: int = 0
    """Number of tokens; padded internally to a multiple of the tensor-parallel size."""

    hidden_size: int = 0
    """Width of the residual stream."""

    share_embeddings_and_output_weights: bool = False
    """Use the word embedding as the output layer too."""

    embedding_multiplier: float = 1.0
    """Factor of the word embedding."""

    round_embedding_multiplier: bool = False
    """Round that factor to params_dtype first, as Gemma does; in bfloat16 it differs."""

    logits_multiplier: float = 1.0
    """Factor of the logits."""

    final_logit_softcap: Annotated[float, Range(gt=0)] | None = None
    """c: logits become c tanh(logits / c), after `logits_multiplier`."""

    num_shared_blocks: Annotated[int, Range(ge=1)] = 1
    """Number of blocks that the `Z` or `V` layers use in turn."""

    num_residual_streams: Annotated[int, Range(ge=2)] | None = None
    """Streams of which the layers up to each `P` compute one; see `models/residual_streams.py`.
    None means one stream, which all layers compute."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of every norm outside of the recurrent mixers."""

    layernorm_bias: bool = True
    """Biases in the norms of `normalization="LayerNorm"`."""

    init_method_std: Annotated[float, Range(ge=0)] = 0.02
    """Standard deviation of initial weights."""

    huggingface_config: dict[str, Any] | None = None
    """config.json of the Hugging Face folder that the weights come from; needed to write one."""

    is_gpt_model: bool = False
    """Whether the weights come from a GPTModel of megatron-core, with attention and MLP in turn. A
    checkpoint for Megatron then holds a GPTModel, not a hybrid model."""

    def check(self) -> None:
        sizes = (f"{each}_model_parallel_size" for each in ("tensor", "pipeline", "expert"))
        self._require_positive("hidden_size", "vocab_size", *sizes)
        fits = self.layer_pattern.endswith("P") and not self.fp32_residual_connection
        if self.num_residual_streams is not None and not fits:
            raise ValueError(
                f"num_residual_streams is {self.num_residual_streams}, for which layer_pattern has "
                "to end with P, and fp32_residual_connection to be False. Leave it at None."
            )
        tp, expert_tp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        if expert_tp is not None and (expert_tp < 1 or tp % expert_tp):
            raise ValueError(
                f"expert_tensor_parallel_size is {expert_tp}, which does not divide "
                f"tensor_model_parallel_size={tp}. Use a divisor, or leave it at None for the same."
            )


@dataclass
class PerLayerInputFields(ModelFields):
    """Fields of the per-layer inputs."""

    per_layer_input_size: int | None = None
    """Width of the token embedding of each `P` layer; see `mixers/per_layer_input.py`."""

    per_layer_vocab_size: Annotated[int, Range(ge=1)] | None = None
    """Tokens with such an embedding; those beyond have that of token 0. None means vocab_size."""

    def check(self) -> None:
        self._require_for_layers(
            "per_layer_input_size", "per-layer input (P)", "the width of such an input"
        )
        if self.pipeline_model_parallel_size > 1:
            raise ValueError(
                "per-layer inputs (P) are made of the tokens, which the first pipeline stage alone "
                f"sees, but there are {self.pipeline_model_parallel_size} stages. Use 1."
            )
