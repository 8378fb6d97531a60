"""config.json as released models have it: older keys, left-out keys, language models inside others.

`hub_configs/` holds such files, sizes and all; nothing is loaded, models are built without storage.
transformers reads each file too, and what it makes of it must mean the same here.
"""

import json
from pathlib import Path

import pytest
import torch
from matrix import matrix_rows
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_hybrid.checkpoints.checkpoint import CheckpointError, read_config
from megatron_hybrid.checkpoints.folder import config_of
from megatron_hybrid.tools.plan import plan, read_model_config

FOLDER = Path(__file__).parent / "hub_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
ONE_OF_EACH = {
    json.loads((FOLDER / f"{name}.json").read_text())["model_type"]: name for name in NAMES
}.values()
"""One file of each architecture."""
QUANTIZED = {
    "deepseek_v3": "fp8",
    "gpt_oss_20b": "mxfp4",
    "minimax_m2": "fp8",
    "mimo_v2_flash": "fp8",
}


def mamba2(heads, head_dim, states, groups):
    """Bytes: a state in fp32, and three positions of x, B and C in bfloat16."""
    return heads * head_dim * states * 4 + (heads * head_dim + 2 * groups * states) * 3 * 2


def delta(key_heads, key_dim, value_heads, value_dim):
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return value_heads * key_dim * value_dim * 4 + channels * 3 * 2


def mamba1(width, states, itemsize=2):
    return width * states * 4 + width * 3 * itemsize


def kv(layers, heads, head_dim, itemsize=2):
    return layers * 2 * heads * head_dim * itemsize


def spread(mixers, mlp):
    """An MLP behind each mixer."""
    return "".join(mixer + mlp for mixer in mixers)


LFM2_MOE = "CC*CCC*CCC*CCC*CCC*CC*CC"
ZAMBA2_7B = "M" * 6 + "ZMMMM" + "ZMMMMM" * 11 + "ZMMM"
EXPECTED = {
    # name: (layer pattern, bytes of KV per token, bytes of states)
    "bamba_9b": (
        spread("MMMMMMMMM*" + "MMMMMMMM*" * 2 + "MMMM", "-"),
        kv(3, 8, 128),
        29 * mamba2(128, 64, 128, 1),
    ),
    "command_r7b": ("RRRQ" * 8, kv(8, 8, 128), 0),
    "deepseek_v3": ("+-" * 3 + "+E" * 58 + "/+E", 61 * (512 + 64) * 2, 0),
    "falcon_h1_0_5b": ("H-" * 36, kv(36, 2, 64), 36 * mamba2(24, 64, 128, 1)),
    "falcon_mamba_7b": ("S" * 64, 0, 64 * mamba1(8192, 16)),
    "gemma_2_9b": ("W-*-" * 21, kv(21, 8, 256, 4), 0),
    "gemma_3_1b": (spread("WWWWW*" * 4 + "WW", "-"), kv(4, 1, 256), 0),
    "gemma_3_27b": (spread("WWWWW*" * 10 + "WW", "-"), kv(10, 16, 128), 0),
    "gemma_3_4b": (spread("WWWWW*" * 5 + "WWWW", "-"), kv(5, 4, 256), 0),
    "gemma_3n_e4b": (spread("WWWW*" * 7, "-P"), kv(4, 2, 256), 0),
    "gemma_4_31b": (spread("WWWWW*" * 10, "-"), kv(10, 4, 512), 0),
    "gpt_oss_20b": ("WE*E" * 12, kv(12, 8, 64), 0),
    "granite_3b_code": ("*-" * 32, kv(32, 32, 80), 0),
    "granite_4_0_h_micro": (
        spread("MMMMM*" + "MMMMMMMMM*" * 3 + "MMMM", "-"),
        kv(4, 8, 64),
        36 * mamba2(64, 64, 128, 1),
    ),
    "granite_4_0_h_small": (
        spread("MMMMM*" + "MMMMMMMMM*" * 3 + "MMMM", "E"),
        kv(4, 8, 128),
        36 * mamba2(128, 64, 128, 1),
    ),
    "jamba_1_5_mini": ("S-SES-SE*-SES-SE" * 4, kv(4, 8, 128), 28 * mamba1(8192, 16)),
    "jamba_reasoning_3b": (spread("SSSSSSS*SSSSSS" * 2, "-"), kv(2, 1, 128), 26 * mamba1(5120, 16)),
    "kimi_linear_48b_a3b": (
        "K-KEKE+E" + "KEKEKE+E" * 5 + "KEKE+E",
        7 * (512 + 64) * 2,
        20 * delta(32, 128, 32, 128),
    ),
    "lfm2_1_2b": (spread("CC*CC*CC*C*C*C*C", "-"), kv(6, 8, 64), 10 * 2048 * 2 * 2),
    "lfm2_8b_a1b": (
        spread(LFM2_MOE[:2], "-") + spread(LFM2_MOE[2:], "E"),
        kv(6, 8, 64),
        18 * 2048 * 2 * 2,
    ),
    "llama_2_7b": ("*-" * 32, kv(32, 32, 128), 0),
    "llama_3_1_8b": ("*-" * 32, kv(32, 8, 128), 0),
    "llama_3_2_1b": ("*-" * 16, kv(16, 8, 64), 0),
    "llama_4_maverick": ("L-LEL-*E" * 12, kv(12, 8, 128), 0),
    "llama_4_scout": ("LELELE*E" * 12, kv(12, 8, 128), 0),
    "mamba_130m": ("S" * 24, 0, 24 * mamba1(1536, 16, 4)),
    "mamba_codestral_7b": ("M" * 64, 0, 64 * mamba2(128, 64, 128, 8)),
    "mimo_v2_flash": (
        "*-WEWEWEWE*E" + "WEWEWEWEWE*E" * 7,
        9 * 4 * (192 + 128) * 2,
        0,
    ),
    "mixtral_8x7b": ("*E" * 32, kv(32, 8, 128), 0),
    "minimax_m2": ("*E" * 62, kv(62, 8, 128), 0),
    "nemotron_3_nano_30b_a3b": (
        "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        kv(6, 2, 128),
        23 * mamba2(64, 64, 128, 8),
    ),
    "nemotron_3_ultra_550b_a55b": (
        "MEMEMEM*EMEMEM*EMEMEMEM*E" * 4 + "MEMEMEME/*E",
        kv(12, 2, 128),
        48 * mamba2(256, 64, 128, 8),
    ),
    "nemotron_h_8b": (
        "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        16 << 10,
        24 * mamba2(128, 64, 128, 8),
    ),
    "olmo_hybrid_7b": ("G-G-G-*-" * 8, kv(8, 30, 128), 24 * delta(30, 96, 30, 192)),
    "phi_4_mini_flash": (
        spread("SW" * 8 + "S*" + "J*" * 7, "-"),
        kv(1, 20, 64),
        9 * mamba1(5120, 16),
    ),
    "qwen3_30b_a3b": ("*E" * 48, kv(48, 4, 128), 0),
    "qwen3_5_35b_a3b": ("GEGEGE*E" * 10 + "/*E", kv(10, 2, 256), 30 * delta(16, 128, 32, 128)),
    "qwen3_5_4b": ("G-G-G-*-" * 8 + "/*-", kv(8, 4, 256), 24 * delta(16, 128, 32, 128)),
    "qwen3_next_80b_a3b": ("GEGEGE*E" * 12, kv(12, 2, 256), 36 * delta(16, 128, 32, 128)),
    "recurrentgemma_2b": (spread("UUW" * 8 + "UU", "-"), 0, 18 * 2560 * (4 + 3 * 4)),
    "step_3": ("*-" * 4 + "*E" * 56 + "*-", kv(61, 1, 256), 0),
    "step_3_5_flash": (
        spread("*WW", "-") + "WE" + "*EWEWEWE" * 10 + "*E",
        kv(12, 8, 128),
        0,
    ),
    "zamba2_2_7b": (
        "M" + "MMMMMZ" * 7 + "MMMMZ" + "MMMZ" + "MM",
        kv(9, 32, 160),
        54 * mamba2(80, 64, 64, 1),
    ),
    "zamba2_7b": (ZAMBA2_7B, kv(13, 32, 224), 81 * mamba2(112, 64, 64, 2)),
}
# What their makers and others measured.
PUBLISHED_STATE_MB = {"nemotron_h_8b": 102, "qwen3_next_80b_a3b": 77, "qwen3_5_4b": 52}


def read(name):
    """The file, without what says that its weights are quantized."""
    values = json.loads((FOLDER / f"{name}.json").read_text())
    values.pop("quantization_config", None)
    return values


def config_here(values):
    return config_of(values, "config.json", perform_initialization=False)


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_sizes(name):
    footprint = plan(read_model_config(FOLDER / f"{name}.json"), 10**13, 8192)
    pattern, kv_bytes, state_bytes = EXPECTED[name]
    assert read_model_config(FOLDER / f"{name}.json", mtp=True).layer_pattern == pattern
    assert footprint.quantization == QUANTIZED.get(name)
    assert footprint.layer_pattern == pattern.split("/")[0]
    assert footprint.model.kv_bytes_per_token == kv_bytes
    assert footprint.model.state_bytes == state_bytes
    if name in PUBLISHED_STATE_MB:
        assert state_bytes / 1e6 == pytest.approx(PUBLISHED_STATE_MB[name], abs=0.5)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_it_alike(name):
    values = read(name)
    ours, theirs = config_here(values), AutoConfig.for_model(**values)
    written = json.loads(theirs.to_json_string(use_diff=False))  # every key, every default
    written["dtype"] = values.get("dtype") or values.get("torch_dtype")
    again = config_here(written).to_dict() | {"huggingface_config": ours.huggingface_config}
    assert again == ours.to_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs.get_text_config())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert plan(ours, 10**13, 1024).parameters == parameters


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", matrix_rows(NAMES, *ONE_OF_EACH))
def test_a_key_that_is_left_out_is_refused_or_means_what_it_does_in_transformers(name):
    """Each one in turn, but for those that say what is read at all."""
    values = read(name)
    kept = ("model_type", "architectures", "dtype", "torch_dtype", "vision_config")
    num_compared = 0
    for key in (values.get("text_config") or values).keys() - set(kept):
        less = json.loads(json.dumps(values))
        del less.get("text_config", less)[key]
        try:
            theirs = AutoConfig.for_model(**less)
        except Exception:  # whatever it is, they cannot do without this key
            continue
        try:
            ours = config_here(less)
        except CheckpointError:
            continue
        written = json.loads(theirs.to_json_string(use_diff=False))
        written["dtype"] = less.get("dtype") or less.get("torch_dtype")
        assert layers(config_here(written)) == layers(ours), key
        num_compared += 1
    assert num_compared >= 5


def layers(config):
    """What a config says of each layer, however it says so."""
    fields = config.to_dict()
    del fields["huggingface_config"]
    if not fields.pop("layer_overrides"):
        return fields
    numbers = range(1, config.num_layers + 1)
    each = [config.for_layer(number).to_dict() for number in numbers]
    return [{**layer, "huggingface_config": None, "layer_overrides": None} for layer in each]


def test_granite_of_attention_alone():
    """It needs no sizes of Mamba layers."""
    values = read("granite_4_0_h_micro")
    values = {key: value for key, value in values.items() if not key.startswith("mamba")}
    values["layer_types"] = ["attention"] * values["num_hidden_layers"]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    parameters = sum(parameter.numel() for parameter in theirs.parameters())
    assert plan(config_here(values), 10**13, 1024).parameters == parameters


def test_an_older_folder_of_modelopt_leaves_out_its_name(tmp_path):
    values = read("qwen3_30b_a3b")
    values["quantization_config"] = {"quant_algo": "FP8", "producer": {"name": "modelopt"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path).params_dtype == torch.bfloat16
    assert plan(read_model_config(tmp_path), 10**13, 8192).quantization == "modelopt"


@pytest.mark.parametrize("part", [None, "text_config"])
def test_quantized_weights_of_a_composite_model_are_refused(part, tmp_path):
    values = read("llama_4_scout")
    (values[part] if part else values)["quantization_config"] = {"quant_method": "quark"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="quant_method='quark'"):
        read_config(tmp_path)
    assert plan(read_model_config(tmp_path), 10**13, 8192).quantization == "quark"


GEMMA_3N = {"model_type": "gemma3n_text"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("falcon_h1_0_5b", {"attn_layer_indices": [3]}, r"attn_layer_indices=\[3\]; only None"),
        ("falcon_h1_0_5b", {"mamba_use_mlp": False}, "mamba_use_mlp=False; only True"),
        ("gpt_oss_20b", {"num_hidden_layers": 36}, "types of 24 layers, but has num_hidden"),
        ("kimi_linear_48b_a3b", {"attn_res_block_size": 2}, "attn_res_block_size=2; only None"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list=0; only 1"),
        ("lfm2_8b_a1b", {"num_experts_per_tok": 1}, "one expert per token"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "one expert per token"),
        ("minimax_m2", {"sliding_window": 512}, "sliding_window=512; only None"),
        ("nemotron_3_nano_30b_a3b", {"num_experts_per_tok": 1}, "one expert per token"),
        ("olmo_hybrid_7b", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' or 'swish'"),
        ("llama_3_2_1b", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "rotates whole heads"),
        ("lfm2_1_2b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("zamba2_7b", {"use_long_context": True}, "use_long_context=True; only False"),
        ("zamba2_7b", {"num_hidden_layers": 54}, "types of 81 layers, but has num_hidden"),
        ("lfm2_1_2b", {"layer_types": ["mamba"] * 16}, "layer type 'mamba'; supported are"),
        ("lfm2_1_2b", {"use_pos_enc": False}, "use_pos_enc=False; only True"),
        ("lfm2_1_2b", {"block_use_swiglu": False}, "block_use_swiglu=False; only True"),
        ("lfm2_8b_a1b", {"norm_topk_prob": False}, "norm_topk_prob=False; only True"),
        ("lfm2_8b_a1b", {"layer_types": None}, "config.json lacks 'layer_types'"),
        ("mamba_130m", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
        ("jamba_1_5_mini", {"mamba_inner_layernorms": False}, "norms=False; only True"),
        ("jamba_1_5_mini", {"sliding_window": 64}, "sliding_window=64; only None"),
        ("llama_3_1_8b", {"per_layer_config": {"3": {"head_dim": 64}}}, "per_layer_config="),
        ("gemma_4_31b", {"per_layer_config": {"60": {}}}, "per_layer_config for the layer 60"),
        ("gemma_3_4b", {"text_config": None}, "text_config=None, where its language model goes"),
        ("gemma_3_4b", {"text_config": GEMMA_3N}, "text_config of the model_type 'gemma3n_text'"),
        ("qwen3_5_4b", {"attn_output_gate": False}, "attn_output_gate=False; only True"),
    ],
)
def test_what_would_be_another_model_is_refused(name, change, message):
    values = read(name)
    part = values if "text_config" in change else values.get("text_config", values)
    part.update(change)
    with pytest.raises(CheckpointError, match=message):
        config_here(values)


def test_whether_a_composite_model_is_tied():
    """The whole says it, else its language model, else it is as in transformers."""
    values = read("gemma_3_4b")
    assert config_here(values).share_embeddings_and_output_weights
    text = {**values["text_config"], "tie_word_embeddings": False}
    assert not config_here({**values, "text_config": text}).share_embeddings_and_output_weights
    both = {**values, "text_config": text, "tie_word_embeddings": True}
    assert config_here(both).share_embeddings_and_output_weights
    assert not config_here(read("llama_4_scout")).share_embeddings_and_output_weights
