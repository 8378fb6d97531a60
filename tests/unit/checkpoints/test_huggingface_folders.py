"""A Hugging Face folder that is broken, foreign or contradicts itself: one clear error each."""

import pytest
import torch
from model_folders import rewrite
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_hybrid as mh
from megatron_hybrid.checkpoints import pretrained
from megatron_hybrid.checkpoints.checkpoint import save_huggingface
from megatron_hybrid.tools.plan import read_model_config

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as transformers saves it, to be broken."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=53,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "has the model_type 'gpt2', which no adapter reads. docs/"),
        ({"model_type": None}, "has the model_type None"),
        ({"model_type": ["llama"]}, "has the model_type ['llama']"),
        ({"hidden_act": "mish"}, "has hidden_act='mish'; supported are silu"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "config.json: hidden_size is '32'; it must be a whole number"),
        ({"head_dim": 8.0}, "head_dim is 8.0; it must be a whole number"),
        ({"num_hidden_layers": 10**7}, "10000000; it must be a whole number from 0 to 10000"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number"),
        ({"rms_norm_eps": None}, "layernorm_epsilon is None; it must be a number"),
        ({"rope_parameters": 1}, "rope_parameters is 1; it must be a mapping"),
        ({"layer_types": "full"}, "layer_types is 'full'; it must be a list"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_query_groups=3"),
        ({"dtype": "int4"}, "params_dtype is torch.int4"),
        # A config that contradicts its weights.
        ({"attention_bias": True}, "but the model has model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "but the model has model.layers.0.mlp.down_proj.bias"),
        ({"num_hidden_layers": 3}, "but the model has model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "but the model does not have model.layers.1.input_layernorm"),
        ({"num_key_value_heads": 4}, "k_proj.weight has shape [16, 32] in"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens"),
        ({"dtype": "bfloat16"}, "is torch.float32 in"),
        # Tensors that contradict it.
        (
            {"change": lambda t: {name: t[name] for name in t if name != K_PROJ}},
            f"but the model has {K_PROJ}",
        ),
        (
            {"change": lambda t: t | {K_PROJ: torch.zeros(16, 31)}},
            f"{K_PROJ} has shape [16, 31] in",
        ),
        (
            {"change": lambda t: t | {K_PROJ: torch.zeros(16, 32).to(torch.float8_e4m3fn)}},
            "float32 in the model. Quantized weights are read with the scales",
        ),
    ],
)
def test_a_folder_that_contradicts_itself(folder, values, message):
    rewrite(folder, **values)
    with pytest.raises(mh.CheckpointError) as error:
        mh.load_pretrained(folder)
    assert message in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("has_both", [True, False])
def test_a_tied_tensor_beside_the_embedding_or_in_its_place(folder, has_both):
    def tie(tensors):
        embedding = tensors.pop("model.embed_tokens.weight")
        both = {"model.embed_tokens.weight": embedding.clone()} if has_both else {}
        return tensors | {"lm_head.weight": embedding} | both

    rewrite(folder, tie, tie_word_embeddings=True)
    model, _ = mh.load_pretrained(folder)
    tied = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.embedding.word_embeddings.weight, tied)


def test_weights_of_another_kind_of_folder(folder):
    """A model of our own, which has no config.json of Hugging Face."""
    config = mh.HybridConfig(
        layer_pattern="*-*-*-", hidden_size=32, num_attention_heads=4, vocab_size=53
    )
    model = mh.build_hybrid_model(config)
    with pytest.raises(mh.CheckpointError, match=r"but the model has model\.layers\.2\."):
        pretrained.load_checkpoint(model, folder)


def test_some_tensors_in_fp32(folder):
    """As in many released folders; transformers rounds them to the model's dtype."""
    halves = {}

    def change(tensors):
        tensors["model.norm.weight"] += torch.rand(32)
        halves.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
        return tensors | {name: half for name, half in halves.items() if "norm" not in name}

    rewrite(folder, change, dtype="bfloat16")
    model, _ = mh.load_pretrained(folder)
    assert torch.equal(model.decoder.final_norm.weight, halves["model.norm.weight"])
    rewrite(folder, lambda t: t | {K_PROJ: t[K_PROJ].double()})
    with pytest.raises(mh.CheckpointError, match=f"{K_PROJ} is torch.float64"):
        mh.load_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dtype_that_is_left_out_is_that_of_the_weights(folder, dtype):
    LlamaForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    rewrite(folder, dtype=None)
    model, _ = mh.load_pretrained(folder)
    theirs = LlamaForCausalLM.from_pretrained(folder)
    assert model.config.params_dtype == theirs.dtype == dtype
    assert read_model_config(folder).params_dtype == dtype
    (folder / "model.safetensors").write_bytes(b"")  # it cannot tell, but who loads it will
    assert read_model_config(folder).params_dtype == torch.float32


def test_what_did_not_come_from_there_does_not_go_back(folder, tmp_path):
    model, _ = mh.load_pretrained("demo")
    with pytest.raises(mh.CheckpointError, match="has no huggingface_config"):
        save_huggingface(model, tmp_path / "back")
    changed, _ = mh.load_pretrained(folder, layernorm_epsilon=1e-3)
    with pytest.raises(mh.CheckpointError, match=r"layernorm_epsilon=0\.001, but its config"):
        save_huggingface(changed, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
