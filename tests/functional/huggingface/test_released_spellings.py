"""Folders as they were released, where transformers writes other names, cuts or config keys."""

import json
from math import log

import pytest
import torch
from huggingface import Reference, build, read_values
from model_folders import rewrite
from put_together import BailingMoeV2_5ForCausalLM, LingConfig
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import save_huggingface
from megatron_hybrid.checkpoints.huggingface import ADAPTERS
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.tools.plan import read_model_config


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    "name, released, written",
    [
        ("olmo_hybrid", "1.post_attention_layernorm", "1.feedforward_layer_norm"),
        ("kimi_linear", "0.mlp.gate_proj", "0.block_sparse_moe.gate_proj"),
    ],
)
def test_both_spellings_are_read_and_the_released_one_is_written(name, released, written, tmp_path):
    build(name).save_pretrained(tmp_path / "theirs")
    model, _ = mh.load_pretrained(tmp_path / "theirs")
    save_huggingface(model, tmp_path / "ours")
    released, written = (f"model.layers.{tensor}.weight" for tensor in (released, written))
    assert names(tmp_path / "theirs") ^ names(tmp_path / "ours") >= {released, written}
    assert released in names(tmp_path / "ours")
    again, _ = mh.load_pretrained(tmp_path / "ours")
    before, after = full_state_dict(model), full_state_dict(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@torch.no_grad()
def assert_equal_logits(folder, theirs, tokens, tolerance=1e-5):
    model, _ = mh.load_pretrained(folder)
    expected = Reference(theirs).logits(tokens)
    torch.testing.assert_close(model(tokens), expected, atol=tolerance, rtol=0)
    return model


@pytest.mark.parametrize(
    ("name", "released", "more"),
    [("qwen2", "mimo", "model.mtp_layers.0.input_proj.weight"), ("deepseek_v3", "kimi_k2", None)],
)
def test_what_transformers_knows_by_another_name(name, released, more, tmp_path):
    theirs = build(name)
    theirs.save_pretrained(tmp_path)
    head = {} if more is None else {more: torch.zeros(2, 2)}
    rewrite(tmp_path, lambda tensors: tensors | head, model_type=released)
    assert_equal_logits(tmp_path, theirs, torch.arange(3, 60)[None], 1e-4)


def test_ling_2_5_has_lightning_attention_and_latent_attention(tmp_path):
    """Its model_type is that of Ling 3."""
    sizes = dict(q_lora_rank=28, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8)
    values = read_values("bailing_moe_linear") | sizes | {"v_head_dim": 18}
    values |= {"model_type": "bailing_hybrid", "num_key_value_heads": 4}
    torch.manual_seed(0)
    theirs = BailingMoeV2_5ForCausalLM(LingConfig(**values)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.08)
    theirs.save_pretrained(tmp_path)
    model = assert_equal_logits(tmp_path, theirs, torch.arange(3, 60)[None])
    assert model.config.layer_pattern == "A-+EAE+-+E"


KIMI = {
    "hidden_size": 32,
    "vocab_size": 50,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
OLMO = {**KIMI, "rope_parameters": {"rope_theta": None}}


def config_of(model_type, **values):
    return ADAPTERS[model_type]().config(values)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MIMO = dict(rope_parameters=None, partial_rotary_factor=0.334, swa_num_key_value_heads=2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"layer_types": MIXED}),
        ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 16}),
        (
            "qwen3",
            {
                "rope_scaling": {**YARN, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 16,
            },
        ),
        ("smollm3", {"num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 9}),
        ("ministral3", {"rope_parameters": None}),
        ("mimo_v2_flash", MIMO),
        ("gemma3n", {"rope_parameters": None, "rope_theta": 5e3, "rope_local_base_freq": 7e2}),
        ("step3p5", {"moe_layers_enum": [2], "attention_other_setting": None}),
    ],
)
def test_keys_mean_what_they_mean_to_transformers(tmp_path, name, changes):
    config = {**read_values(name), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(known, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(tmp_path, theirs, torch.randint(3, config["vocab_size"], (1, 60)))


INDEXED = [{"block_type": "attention", "q_indexer_top_k": 8}]
FEWER = {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}}
WINDOW = [{"block_type": "attention", "sliding_window": 64}]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("phi3", {"rope_parameters": None, "rope_scaling": YARN}, "only 'default' is supported"),
        ("qwen2", {"layer_types": MIXED}, "lacks 'sliding_window'"),
        ("qwen2_moe", {"layer_types": MIXED}, "lacks 'sliding_window'"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.0}}, "rotary_percent is 0.0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "no usable config"),
        ("qwen3_moe", {"num_experts": 0}, "num_moe_experts"),
        ("nemotron_h_puzzle", {"block_configs": {}}, "block_configs is {}; it must be a list"),
        ("nemotron_h_puzzle", {"block_configs": ["moe"]}, r"block_configs\[0\]='moe'; supported"),
        ("nemotron_h_puzzle", {"block_configs": INDEXED}, r"\[0\]={.*'q_indexer_top_k': 8}; supp"),
        ("nemotron_h_puzzle", {"block_configs": WINDOW}, "sliding_window=64; only None is"),
        ("bailing_moe_linear", {"use_qk_norm": False}, "use_qk_norm=False; only True is"),
        ("bailing_moe_linear", {"num_attention_heads": 6}, "num_attention_heads=6, which is no"),
        ("olmo_hybrid", {"rope_parameters": None}, "rope_parameters=None"),
        ("olmo_hybrid", {"rope_parameters": {}}, "rope_parameters={}"),
        ("olmo_hybrid", {"layer_types": ["full_attention"]}, "num_hidden_layers="),
        ("olmo_hybrid", {"layer_types": ["mamba"] * 4}, "'mamba'"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False"),
        ("kimi_linear", {"moe_renormalize": False}, "moe_renormalize=False"),
        ("kimi_linear", {"layer_types": ["full_attention"]}, "num_hidden_layers="),
        ("kimi_linear", {"mlp_layer_types": ["moe"] * 4}, "'moe'"),
        ("kimi_linear", FEWER, "the layer type None"),
        ("kimi_linear", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ("kimi_linear", {"num_expert_group": 4, "topk_group": 3}, "experts per token"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "one expert per token"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("gemma2", {"model_type": "paligemma"}, "'paligemma', which no adapter reads"),
    ],
)
def test_a_folder_that_would_be_another_model_is_refused(tmp_path, name, changes, said):
    values = read_values(name)
    values = {**values, "text_config": values, **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(mh.CheckpointError, match=said):
        read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_keys_and_values_that_nobody_reads_are_left_out(name, tmp_path):
    """As released folders have them in layers that read those of others."""
    build(name).save_pretrained(tmp_path)
    own, unread = (f"model.layers.{i}.self_attn.k_proj" for i in (1, 4))
    rewrite(tmp_path, lambda t: t | {f"{unread}.weight": t[f"{own}.weight"].clone()})
    mh.load_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t | {f"{own}.bias": t.pop(f"{own}.weight")})
    with pytest.raises(mh.CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj"):
        mh.load_pretrained(tmp_path)


def test_layers_that_predict_further_tokens(tmp_path):
    """Behind the last layer of DeepSeek's there is one that predicts a second token, or several;
    transformers knows the one of the largest model alone, by its number."""
    theirs = build("deepseek_v3")
    theirs.save_pretrained(tmp_path)
    last, tensors = "model.layers.2.", load_file(tmp_path / "model.safetensors")
    layer = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    assert len(layer) > 10
    another = {f"model.layers.3.{name}": tensor.clone() for name, tensor in layer.items()}
    rewrite(tmp_path, lambda _: {**tensors, **another})
    with pytest.raises(mh.CheckpointError, match=r"does not have model\.layers\.3\."):
        mh.load_pretrained(tmp_path)  # an ordinary layer

    width = theirs.config.hidden_size
    embedding = tensors["model.embed_tokens.weight"]
    layer |= {
        "eh_proj.weight": torch.ones(width, 2 * width),
        "enorm.weight": torch.ones(width),
        "hnorm.weight": torch.ones(width),
        "shared_head.norm.weight": torch.ones(width),
        "shared_head.head.weight": embedding,
        "embed_tokens.weight": embedding,
    }
    for number in (3, 4):
        tensors |= {f"model.layers.{number}.{name}": t.clone() for name, t in layer.items()}
    rewrite(tmp_path, lambda _: tensors)
    assert_equal_logits(tmp_path, theirs, torch.arange(30).view(1, 30))


def test_the_number_of_a_further_layer_is_that_of_a_layer_in_a_larger_model(tmp_path):
    theirs = build("deepseek_v3", num_hidden_layers=63, first_k_dense_replace=63)
    theirs.save_pretrained(tmp_path)
    assert_equal_logits(tmp_path, theirs, torch.arange(30).view(1, 30))


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({}, 0.5),
        ({"attn_rotary_emb": 4}, 0.25),
        ({"attn_rotary_emb": 4, "partial_rotary_factor": 0.5}, 0.25),  # it is the model's own
        ({"attn_rotary_emb": 4, "rope_parameters": {"partial_rotary_factor": 0.5}}, 0.25),
        ({"partial_rotary_factor": 0.75}, 0.75),
    ],
)
def test_the_rotated_part_of_bambas_heads(values, share):
    """transformers rotates half of each head, whatever the file says."""
    fields = config_of("bamba", **KIMI, mamba_n_heads=4, **values)
    assert fields["kv_channels"] == 16
    assert fields["rotary_percent"] == share


@pytest.mark.parametrize(
    ("values", "amplitude"),
    [
        ({}, None),  # 1 and 0, which is YaRN's own
        ({"mscale": 0.7}, 0.1 * 0.7 * log(40) + 1),
        ({"mscale_all_dim": 0.7}, (0.1 * log(40) + 1) / (0.1 * 0.7 * log(40) + 1)),
        ({"mscale": 0.7, "mscale_all_dim": 0.3}, None),  # as in transformers
        ({"mscale": 0.7, "attention_factor": 1.5}, 1.5),
    ],
)
def test_deepseeks_yarn_with_one_of_its_scales(values, amplitude):
    """In the published code the other one is 1 or 0; transformers takes both or neither."""
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, **values}
    scaling = config_of("deepseek_v3", **KIMI, rope_scaling=yarn)["rotary_scaling"]
    assert scaling.get("attention_factor") == (amplitude and pytest.approx(amplitude))


def test_defaults_of_layer_kinds():
    fields = config_of("kimi_linear", **{**KIMI, "num_hidden_layers": 6})
    assert fields["layer_pattern"] == "K-KEKEKE+EKE"
    assert config_of("olmo_hybrid", **OLMO)["layer_pattern"] == "G-G-G-*-"
    fields = config_of("olmo_hybrid", **{**OLMO, "num_hidden_layers": 2})
    assert fields["layer_pattern"] == "G-*-"
    assert fields["layer_overrides"].keys() == {"*", "4"}
    assert fields["position_embedding_type"] == "none"
