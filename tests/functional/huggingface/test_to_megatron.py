"""Released models of small sizes, written for Megatron and computed by megatron-core's classes."""

import json

import pytest
import stock_megatron
import torch
import torch.distributed as dist
from huggingface import CONFIGS, Reference, build_of, in_float64, twin_in_float64
from matrix import matrix_rows
from megatron.core import parallel_state
from megatron_folders import load_folder
from models_table import CALLS, TABLE, read_released, released_rows
from packed_folders import write_folders
from rank_processes import on_ranks
from safetensors.torch import load_file
from test_hub_configs import FOLDER
from test_predictions import PROJECTIONS, RELEASED
from test_predictions import Reference as ReferenceWithHead

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.megatron.torch_dist import DistributedTensors
from megatron_hybrid.compat import TransformerConfig
from megatron_hybrid.serving.parsers.choice import TOOL_PARSERS
from megatron_hybrid.tools.convert import convert

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_head_dim": 16,
    "attn_rotary_emb": 8,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "num_heads": 8,
    "state_size": 12,
    "ssm_state_size": 12,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "initializer_range": 0.15,
}
"""Keys of a config.json that are cut, where it has them."""

EVERY_FOURTH = ["linear_attention"] * 3 + ["full_attention"]
QWEN = {"num_hidden_layers": 4, "layer_types": EVERY_FOURTH, "head_dim": 32}
GRANITE = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "logits_scaling": 1.5}
QWEN35 = {**QWEN, "rope_parameters": {"mrope_section": [2, 1, 1]}}
UNCLAMPED = {"num_hidden_layers": None, "time_step_min": 1e-9}  # as the makers' own code
PLAIN = ["granite_3b_code", "llama_2_7b", "llama_3_1_8b", "mamba_codestral_7b", "mixtral_8x7b"]
PLAIN += ["qwen3_30b_a3b"]
OF_OTHERS = ["ernie4_5", "glm4_moe", "granite", "granitemoe", "llama_mlp_biases", "mistral"]
OF_OTHERS += ["phi3", "qwen2", "qwen2_moe", "qwen3", "seed_oss", "smollm3"]
CHANGES = {
    "bamba_9b": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "deepseek_v3": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {"num_experts_per_tok": 8},
    "gpt_oss_20b": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    | {"sliding_window": 8},
    "granite_4_0_h_micro": GRANITE,
    "granite_4_0_h_small": GRANITE,
    "nemotron_3_nano_30b_a3b": {"hybrid_override_pattern": "ME*E", **UNCLAMPED},
    "nemotron_3_ultra_550b_a55b": {"layers_block_type": ["mamba", "moe", "attention", "moe"]}
    | {"moe_latent_size": None, **UNCLAMPED},  # core has latents with Transformer Engine alone
    "nemotron_h_8b": {"hybrid_override_pattern": "M-M*-", **UNCLAMPED},
    "qwen3_5_35b_a3b": QWEN35,
    "qwen3_5_4b": QWEN35,
    "qwen3_next_80b_a3b": QWEN,
    **{name: {} for name in OF_OTHERS},
    **{name: {"num_hidden_layers": 2} for name in PLAIN},
}
"""The models that megatron-core can hold, and what is changed besides the sizes."""


NEED_MUP = {"granite", "granitemoe", "granite_4_0_h_micro", "granite_4_0_h_small"}
if not hasattr(TransformerConfig, "use_mup"):  # since 0.17: factors of embedding and logits
    CHANGES = {name: changes for name, changes in CHANGES.items() if name not in NEED_MUP}
ONE_OF_A_KIND = ["deepseek_v3", "gpt_oss_20b", "granite_4_0_h_small", "nemotron_h_8b"]
ONE_OF_A_KIND = [name for name in [*ONE_OF_A_KIND, "qwen3_next_80b_a3b"] if name in CHANGES]
TOKENS = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(3))


def small(name):
    """The config.json of a language model, with its options and a few small layers."""
    path, *_ = [*FOLDER.glob(f"{name}.json"), *CONFIGS.glob(f"{name}.json")]
    values = json.loads(path.read_text())
    values = values.get("text_config", values)
    for key in ("quantization_config", "architectures", "dtype", "torch_dtype"):
        values.pop(key, None)
    values |= {key: size for key, size in SIZES.items() if key in values}
    rope = values.get("rope_parameters")
    values |= CHANGES[name]
    if rope is not None:
        values["rope_parameters"] = {**rope, **CHANGES[name].get("rope_parameters", {})}
    values = {key: value for key, value in values.items() if not key.endswith("_token_id")}
    return {**values, "pad_token_id": 0}


def logits_of_core(folder, **sizes):
    """What the model of a folder's arguments computes with the folder's weights, on this rank."""
    with stock_megatron.on_cpu():
        stock = stock_megatron.model_of_args(DistributedTensors(folder).args, **sizes).eval()
        load_folder(stock, folder / "release")
    return stock_megatron.logits_of(stock, TOKENS)


@pytest.fixture(scope="module", params=matrix_rows(CHANGES, *ONE_OF_A_KIND))
def converted(request, tmp_path_factory):
    """(model of transformers, its folder, the folder for Megatron)."""
    theirs, path = build_of(small(request.param)), tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path / "theirs")
    convert(path / "theirs", path / "megatron", "torch_dist")
    return theirs, path / "theirs", path / "megatron"


def test_core_computes_what_transformers_does(converted):
    theirs, _, folder = converted
    with in_float64():
        expected = Reference(twin_in_float64(theirs)).logits(TOKENS)
    allowed = (Reference(theirs).logits(TOKENS) - expected).abs().max() + 1e-5 * expected.std()
    assert (logits_of_core(folder) - expected).abs().max() < 3 * allowed
    assert expected.std() > 0.3, "the model says too little to compare"


def logits_of_ranks(folder, names):
    split = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    parallel_state.initialize_model_parallel(2, **split)
    found = {}
    for name in names:
        experts = {**split, "moe_token_dispatcher_type": "allgather"}
        experts = experts if DistributedTensors(folder / name).args.num_experts else {}
        own = logits_of_core(folder / name, tensor_model_parallel_size=2, **experts)
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own.contiguous())
        found[name] = torch.cat(parts, -1)
    return found


@pytest.mark.matrix
def test_core_computes_the_same_over_two_ranks(tmp_path):
    for name in CHANGES:
        build_of(small(name)).save_pretrained(tmp_path / "theirs" / name)
        convert(tmp_path / "theirs" / name, tmp_path / name, "torch_dist")
    found, _ = on_ranks(logits_of_ranks, 2, tmp_path, tmp_path, list(CHANGES))
    for name in CHANGES:
        expected = logits_of_core(tmp_path / name)
        torch.testing.assert_close(found[name], expected, atol=1e-4, rtol=1e-4, msg=name)


def check_same(folders):
    """Two folders of Hugging Face have the same tensors."""
    before, after = (load_file(path / "model.safetensors") for path in folders)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith("linear_attn.norm.weight"):  # stored less 1
            torch.testing.assert_close(after[name], tensor, atol=1e-7, rtol=0)
        else:
            assert torch.equal(after[name], tensor), name


def test_there_and_back_are_the_same_bits(converted, tmp_path):
    _, folder, megatron = converted
    convert(megatron, tmp_path, "huggingface", None, folder)
    check_same((folder, tmp_path))


def test_an_mtp_head_is_loaded_by_core_and_comes_back(tmp_path):
    source, megatron, back = (tmp_path / name for name in ("source", "megatron", "back"))
    ReferenceWithHead("qwen3_5_moe").save(source, RELEASED["qwen3_5_moe"])
    convert(source, megatron, "torch_dist")
    if not stock_megatron.IS_0_16:  # which asks for labels
        with torch.no_grad():
            expected = mh.load_pretrained(source, device="cpu")[0](TOKENS)
        torch.testing.assert_close(logits_of_core(megatron), expected, atol=1e-4, rtol=1e-4)
    convert(megatron, back, "huggingface", None, source)
    check_same((source, back))


def test_packed_weights_are_written_dequantized(tmp_path):
    build_of(small("qwen3_next_80b_a3b")).bfloat16().save_pretrained(tmp_path / "source")
    folders = write_folders(tmp_path / "source", tmp_path, {PROJECTIONS: "fp8-small-blocks"})
    assert mh.load_pretrained(folders[0])[0].packed_source is not None
    models = []
    for folder in folders:
        convert(folder, folder / "megatron", "torch_dist")
        models.append(mh.load_megatron(folder / "megatron").state_dict())
    assert all(t is None or torch.equal(t, models[1][name]) for name, t in models[0].items())


def test_the_table_in_the_docs_is_of_the_released_models():
    assert read_released(TABLE) == released_rows(FOLDER)
    assert {c for calls in CALLS.values() for c in calls.split(", ")} <= {*TOOL_PARSERS, "none", ""}
    written = {row.split()[1] for row in read_released(TABLE) if "both ways, " in row}
    assert written - set(CHANGES) <= NEED_MUP
