"""config.json as LFM2, Mamba, FalconMamba and Jamba models on the hub have it: older keys, and keys
left out, mean here what they mean to transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_hybrid.checkpoints.huggingface import adapters
from megatron_hybrid.models.config.hybrid_config import HybridConfig

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LFM2 = {
    "model_type": "lfm2",
    **SMALL,
    "intermediate_size": 12,
    "block_ff_dim": 90,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_use_swiglu": True,
    "full_attn_idxs": [1],
    "num_key_value_heads": 2,
    "rope_theta": 5e5,
    "use_pos_enc": True,
    "tie_embedding": False,
}
LFM2_MOE = {
    "model_type": "lfm2_moe",
    **SMALL,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_key_value_heads": 2,
    "num_experts": 6,
    "tie_embedding": True,
}
MAMBA = {"model_type": "mamba", "vocab_size": 64, "hidden_size": 40, "num_hidden_layers": 2}
JAMBA = {
    "model_type": "jamba",
    **SMALL,
    "num_hidden_layers": 6,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "mamba_inner_layernorms": True,
    "sliding_window": None,
    "num_experts": 4,
}


def our_config(hf):
    fields = adapters()[hf["model_type"]].config(hf)
    return HybridConfig(**fields, huggingface_config=hf)


@pytest.mark.parametrize(
    "hf",
    [
        LFM2,
        {**LFM2, "block_auto_adjust_ff_dim": False},
        {**LFM2, "full_attn_idxs": None},
        {**LFM2, "block_ffn_dim_multiplier": 1.3, "block_ff_dim": 91},
        LFM2_MOE,
        MAMBA,
        {**MAMBA, "model_type": "falcon_mamba", "expand": 16, "intermediate_size": 80},
        JAMBA,
        {**JAMBA, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    ],
)
def test_it_names_the_tensors_and_sizes_that_transformers_has(hf):
    values = {key: value for key, value in hf.items() if key != "model_type"}
    their_config = AutoConfig.for_model(hf["model_type"], **values)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(their_config)
    config = our_config(hf)
    assert config.share_embeddings_and_output_weights == their_config.tie_word_embeddings
    eps = getattr(their_config, "norm_eps", getattr(their_config, "layer_norm_epsilon", 1e-6))
    assert config.layernorm_epsilon == eps
    if getattr(their_config, "rope_parameters", None):
        assert config.rotary_base == their_config.rope_parameters["rope_theta"]
    parameters = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    maps = list(adapters()[hf["model_type"]].tensors(config))
    names = {name for tensor_map in maps for name in tensor_map.theirs}
    stacked = {name for name in parameters if ".experts." in name}
    tied = {"lm_head.weight"} if config.share_embeddings_and_output_weights else set()
    separate = {name for name in names if ".experts." in name}  # one by one on disk
    assert names - separate == parameters.keys() - stacked - tied
    assert bool(separate) == bool(stacked)
    for name, shape in parameters.items():
        if name.endswith(("w1.weight", "feed_forward.gate_proj.weight")):
            assert shape[0] == config.ffn_hidden_size
        if name.endswith("x_proj.weight"):
            rank, states = config.mamba1_dt_rank, config.mamba1_state_dim
            assert shape == (rank + 2 * states, config.mamba1_inner_size)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({**LFM2, "layer_types": ["conv", "mamba", "conv"]}, "layer type 'mamba'; supported are"),
        ({**LFM2, "use_pos_enc": False}, "use_pos_enc=False; only True"),
        ({**LFM2, "block_use_swiglu": False}, "block_use_swiglu=False; only True"),
        ({**LFM2_MOE, "norm_topk_prob": False}, "norm_topk_prob=False; only True"),
        ({**LFM2_MOE, "layer_types": None}, "config.json lacks 'layer_types'"),
        ({**MAMBA, "hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
        ({**JAMBA, "mamba_inner_layernorms": False}, "mamba_inner_layernorms=False; only True"),
        ({**JAMBA, "sliding_window": 64}, "sliding_window=64; only None"),
    ],
)
def test_refused(hf, message):
    with pytest.raises(ValueError) as error:
        our_config(hf)
    assert message in str(error.value)
