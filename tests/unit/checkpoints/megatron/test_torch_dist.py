"""torch_dist folders, against megatron-core's own models, writer and reader."""

import io
import logging
import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import PosixPath
from types import SimpleNamespace

import pytest
import stock_megatron
import torch
import transformers
from megatron_folders import PATTERN_ARGUMENT, load_folder, megatron_args, save_folder

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.megatron.pickles import load_pickle
from megatron_hybrid.checkpoints.megatron.torch_dist import DistributedTensors, save_megatron
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.compat import activations
from megatron_hybrid.ops.activations import squared_relu
from megatron_hybrid.tools.convert import convert

VOCAB = 61
EXPERTS = {"moe_router_topk": 2, "moe_ffn_hidden_size": 20}
LATENT = {"multi_latent_attention": True, "v_head_dim": 12, "qk_layernorm": True}
LATENT |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5}
PLAIN = {**LATENT, "q_lora_rank": None, "rope_type": "rope", "mscale_all_dim": 1.0}
PLAIN["qk_layernorm"] = stock_megatron.IS_0_16  # newer ones have it by Transformer Engine alone
UNREAD = {"moe_router_num_groups": 2, "moe_shared_expert_gate": True}
DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 1, 0]}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NO_GATE = {"gated_linear_unit": False, "activation_func": activations.squared_relu}

# name: (pattern, None for a GPTModel; Megatron's arguments)
MODELS = {
    "hybrid": ("M*-M", {}),
    "hybrid of 0.16's ratios": ("MM*-", {PATTERN_ARGUMENT: None}),
    "tied, no gate, LayerNorm": (
        "M-*-",
        {"swiglu": False, "squared_relu": True, "normalization": "LayerNorm"}
        | {"position_embedding_type": "none"}
        | {"untie_embeddings_and_output_weights": False},
    ),
    "hybrid experts": (
        "ME*E",
        {**EXPERTS, "num_experts": 4, "moe_shared_expert_intermediate_size": 28}
        | {"rotary_percent": 0.5, "rotary_base": 500000},
    ),
    "windows": (
        "*-M*",
        {"window_size": (7, 0), "window_attn_skip_freq": [1, 0, 0, 0]}
        | {"rotary_seq_len_interpolation_factor": 2.0, "null_tokenizer_eod_id": None},
    ),
    "gpt": (
        None,
        {"num_layers": 3, "qk_layernorm": True, "use_rope_scaling": True}
        | {"norm_epsilon": 1e-3, "rope_scaling_factor": 4.0},  # which no GPTModel gets
    ),
    "gpt with biases": (
        None,
        {"num_layers": 2, "swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": True}
        | {"group_query_attention": False, "num_query_groups": 1},
    ),
    "gpt of unlike layers": (
        None,
        {**EXPERTS, **UNREAD, "num_layers": 3, "num_experts": 4, "moe_layer_freq": [0, 1, 0]},
    ),
    "gpt latents": (
        None,
        {**LATENT, **YARN, "num_layers": 2, "original_max_position_embeddings": 16}
        | {"position_embedding_type": ["not read"]},
    ),
    "gpt with an MTP head": (
        None,
        {**EXPERTS, **PLAIN, "num_layers": 2, "num_experts": 4, "mtp_num_layers": 1},
    ),
    "gpt with Gated DeltaNet": (
        None,
        {**DELTA, "num_layers": 3, "attention_output_gate": True, "mtp_num_layers": 2},
    ),
}


def build(name, seed=1, **fields):
    """A stock model in eval mode, with parameters that hide no mistakes."""
    torch.manual_seed(seed)
    with stock_megatron.on_cpu(), torch.no_grad():
        model = stock_megatron.model_of_args(args_of(name, **fields), MODELS[name][0])
        stock_megatron.scramble(model)
        return model.eval()


def run(model):
    """A stock model's logits."""
    if model.config.mtp_num_layers:  # with such heads 0.16 wants labels
        model.mtp_process = False
        model.config.mtp_num_layers = None
    return stock_megatron.logits_of(model, TOKENS)


LLAMA = transformers.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.15,
)
TOKENS = torch.arange(40)[None] * 7 % VOCAB


def args_of(name, **fields):
    pattern, args = MODELS[name]
    pattern = {} if pattern is None else {"num_layers": len(pattern), PATTERN_ARGUMENT: pattern}
    return megatron_args(**{**pattern, **args, **fields})


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
    assert expected.abs().max() > 0.5, "the model says too little to compare"


@pytest.mark.parametrize("name", MODELS)
def test_a_stock_model_s_folder_gives_its_logits_and_core_loads_what_is_written(tmp_path, name):
    stock = build(name)
    save_folder(stock, tmp_path / "first", args_of(name))
    model = mh.load_megatron(tmp_path / "first")
    close(logits(model), run(stock))
    save_megatron(model, tmp_path / "second")
    other = build(name, seed=2)
    with stock_megatron.on_cpu():
        load_folder(other, tmp_path / "second" / "release")
    for tensor_name, value in stock.state_dict().items():
        assert value is None or torch.equal(value, other.state_dict()[tensor_name]), tensor_name
    again = mh.load_megatron(tmp_path / "second")
    assert again.config.differences(model.config) == []
    assert again.config.pattern == model.config.pattern
    states = full_state_dict(model), full_state_dict(again)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def keys_and_shapes(path):
    entries = pickle.loads((path / ".metadata").read_bytes()).state_dict_metadata
    return {k: getattr(v, "size", None) for k, v in entries.items() if "common_state" not in k}


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith("gpt")])
def test_a_gpt_checkpoint_stays_one_over_ours_and_back(tmp_path, name):
    stock = build(name)
    path = save_folder(stock, tmp_path / "first", args_of(name))
    convert(tmp_path / "first", tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "second", "torch_dist")
    assert keys_and_shapes(tmp_path / "second" / "release") == keys_and_shapes(path)
    args = DistributedTensors(tmp_path / "second").args
    assert args.num_layers == stock.config.num_layers
    assert not hasattr(args, PATTERN_ARGUMENT)
    close(logits(mh.load_megatron(tmp_path / "second")), run(stock))


@pytest.fixture
def saved(tmp_path):
    """(stock model, folder, the iteration in it)."""
    stock = build("hybrid")
    return stock, tmp_path, save_folder(stock, tmp_path, args_of("hybrid"))


def test_one_iteration_the_latest_and_a_release(saved):
    stock, folder, path = saved
    save_folder(build("hybrid", seed=2), folder, args_of("hybrid"), iteration=200)
    close(logits(mh.load_megatron(path)), run(stock))
    assert not torch.equal(logits(mh.load_megatron(folder)), logits(mh.load_megatron(path)))
    path.rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release\n")
    close(logits(mh.load_megatron(folder)), run(stock))


def test_tokens_of_padding_can_be_left_out(tmp_path):
    stock = build("hybrid", padded_vocab_size=64)
    save_folder(stock, tmp_path, args_of("hybrid", padded_vocab_size=64))
    close(logits(mh.load_megatron(tmp_path)), run(stock))
    model = mh.load_megatron(tmp_path, vocab_size=VOCAB)
    assert model.output_layer.weight.shape == (VOCAB, 48)
    close(logits(model), run(stock)[..., :VOCAB])
    null = {"tokenizer_type": "NullTokenizer", "padded_vocab_size": 64}
    path, newer = tmp_path / "iter_0000100", {"null_tokenizer_eod_id": None}
    for size, fields, expected in (("60", {}, 61), ("64", {}, 64), ("60", newer, 60)):
        rewrite_args(path, args_of("hybrid", **null, vocab_size=size, **fields))
        assert mh.load_megatron(tmp_path).config.vocab_size == expected


def test_what_no_builder_passes_on_turns_nothing(saved, caplog):
    stock, folder, path = saved
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        rewrite_args(path, args_of("hybrid", **{name: 4.0}))
        close(logits(mh.load_megatron(folder)), run(stock))
        assert f"{name} is 4.0" in caplog.text
    yarn = {**YARN, "position_embedding_type": "yarn"}
    for new, kind in (({}, "none"), ({"yarn_original_max_position_embeddings": None}, "rope")):
        rewrite_args(path, args_of("hybrid", **yarn, **new))
        assert mh.load_megatron(folder).config.position_embedding_type == kind


def test_dtypes(tmp_path):
    stock = build("hybrid").bfloat16()
    save_folder(stock, tmp_path, args_of("hybrid", bf16=True, params_dtype=torch.bfloat16))
    model = mh.load_megatron(tmp_path)
    assert model.output_layer.weight.dtype == torch.bfloat16
    assert torch.equal(model.output_layer.weight, stock.output_layer.weight)
    wide = mh.load_megatron(tmp_path, dtype=torch.float32)
    assert torch.equal(wide.output_layer.weight, stock.output_layer.weight.float())


def test_what_is_no_weight_of_the_decoder_is_left(tmp_path, caplog):
    stock, other = build("gpt"), build("hybrid")
    others = {
        "optimizer": other.sharded_state_dict("optimizer.state.exp_avg."),
        "chained": other.sharded_state_dict("chained_0.optimizer.state.exp_avg."),
        "mtp": other.sharded_state_dict("mtp.layers.0."),
        "opt_param_scheduler": {"max_lr": 1e-3},
        "rng": torch.get_rng_state(),
    }
    save_folder(stock, tmp_path, args_of("gpt", mtp_num_layers=1), **others)
    with caplog.at_level(logging.WARNING):
        close(logits(mh.load_megatron(tmp_path)), run(stock))
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [message for message in messages if "multi-token" in message]
    assert "multi-token prediction are left out" in message


def test_a_pattern_with_stages_and_prediction(saved):
    stock, folder, _ = saved
    save_folder(stock, folder, args_of("hybrid", **{PATTERN_ARGUMENT: "M*|-|M/MM"}), iteration=200)
    model = mh.load_megatron(folder)
    assert model.config.layer_pattern == "M*-M"
    close(logits(model), run(stock))
    assert mh.load_megatron(folder, layer_pattern="M*|-M").config.layer_pattern == "M*|-M"


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rewrite_args(path, args):
    torch.save({"args": args}, path / "common.pt")  # which counts in every release


def test_pickles_run_nothing(saved, tmp_path):
    _, folder, path = saved
    trap = tmp_path / "trap"
    rewrite_args(path, args_of("hybrid", tokenizer_model=Hostile(trap)))
    with pytest.raises(mh.CheckpointError, match=r"posix\.mkdir, which is no part .* could run"):
        mh.load_megatron(folder)
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(trap)))
    with pytest.raises(mh.CheckpointError, match=r"\.metadata is not read: it names posix\.mkdir"):
        mh.load_megatron(folder)
    assert not trap.exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_all_releases_of_python_are_read(module):
    """Python 3.13 names the second one."""
    written = f"c{module}\nPosixPath\n(Va\nVb\ntR.".encode()
    assert load_pickle(io.BytesIO(written)) == PosixPath("a/b")


def test_pieces_run_nothing_and_stay_in_their_folder(saved, tmp_path):
    _, folder, path = saved
    trap = tmp_path / "trap"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    where = {index.fqn: info for index, info in metadata.storage_data.items()}
    info = where["decoder.final_norm.weight"]
    torch.save(Hostile(trap), path / "trap.distcp")
    info.relative_path, info.offset = "trap.distcp", 0
    info.length = (path / "trap.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(mh.CheckpointError, match=r"final_norm\.weight in .* is not read"):
        mh.load_megatron(folder)
    info.relative_path = "../trap.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(mh.CheckpointError, match=r"final_norm.weight into '\.\./trap\.distcp'"):
        mh.load_megatron(folder)
    assert not trap.exists()


def test_classes_that_are_not_installed_are_only_in_the_way_where_they_count(
    saved, monkeypatch, tmp_path
):
    _, folder, path = saved
    kind = type("Gone", (), {"__module__": "megatron.gone"})
    monkeypatch.setitem(sys.modules, "megatron.gone", SimpleNamespace(Gone=kind))
    others = {"data_sharding": kind(), "exit_signal": signal.SIGTERM, "save": tmp_path}
    rewrite_args(path, args_of("hybrid", **others))
    assert mh.load_megatron(folder).config.layer_pattern == "M*-M"
    rewrite_args(path, args_of("hybrid", normalization=kind()))
    with pytest.raises(mh.CheckpointError, match=r"normalization is megatron\.gone\.Gone"):
        mh.load_megatron(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type is 'learned_ab"),
        ({"heterogeneous_layers_config_path": "x.json"}, "heterogeneous_layers_config_path is 'x"),
        ({"mamba_num_groups": 5}, "not a multiple of mamba_num_groups=5"),
        ({"mamba_state_dim": 24}, r"in_proj\.weight\.B has shape \[24, 48\].* gives it \[48, 48\]"),
        ({PATTERN_ARGUMENT: "M*-"}, r"in .* but the model does not have decoder\.layers\.3"),
        ({PATTERN_ARGUMENT: "M*-MM", "num_layers": 5}, r"the model has decoder\.layers\.4"),
        ({"num_layers": 10**18}, f"num_layers is {10**18}, of [0-9]+ tensors"),
        ({"padded_vocab_size": 62}, r"word_embeddings\.weight has shape \[61, 48\]"),
    ],
)
def test_args_that_do_not_fit(saved, fields, message):
    _, folder, path = saved
    rewrite_args(path, args_of("hybrid", **fields))
    with pytest.raises(mh.CheckpointError, match=message):
        mh.load_megatron(folder)


def test_missing_and_broken_parts(saved, tmp_path):
    _, folder, path = saved

    def refused(message, place=folder):
        with pytest.raises(mh.CheckpointError, match=message):
            mh.load_megatron(place)

    refused("has neither latest_checkpointed_iteration.* is no folder", tmp_path / "nothing")
    args = args_of("hybrid")
    del args.untie_embeddings_and_output_weights
    rewrite_args(path, args)
    refused("lack 'untie_embeddings_and_output_weights'")
    torch.save({"iteration": 3}, path / "common.pt")
    refused("has no arguments of Megatron-LM")
    (path / "common.pt").write_bytes(b"")
    refused("common.pt cannot be read")
    rewrite_args(path, args_of("hybrid"))
    with pytest.raises(ValueError, match="hidden_size is -1") as error:
        mh.load_megatron(folder, hidden_size=-1)
    assert not isinstance(error.value, mh.CheckpointError)

    file = path / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    refused("cannot be read")
    file.unlink()
    refused(r"Copy or save (it|all of them) again")
    file.write_bytes(content)

    tracker = folder / "latest_checkpointed_iteration.txt"
    for file, text, message in (
        (path / "metadata.json", '{"sharded_backend": "zarr"}', "as 'zarr'; only torch_dist is"),
        (path / "metadata.json", "[" * 5000, "metadata.json cannot be read as JSON"),
        (tracker, "7", r"iter_0000007/\.metadata does not exist"),
        (tracker, "../100", r"says '\.\./100', neither a number nor 'release'"),
        (tracker, "1" * 5000, "latest_checkpointed_iteration.txt cannot be read .ValueError"),
    ):
        file.write_text(text)
        refused(message)
    tracker.write_text("100")
    (path / "metadata.json").unlink()
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    refused("holds no metadata of torch.distributed.checkpoint")
    (path / ".metadata").write_bytes(b"\x80\x04.")
    refused("cannot be read")


def test_a_tensor_saved_in_part_and_one_of_a_petabyte(saved):
    _, folder, path = saved
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["decoder.final_norm.weight"].chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(mh.CheckpointError, match=r"final_norm\.weight lacks 48 of its 48"):
        mh.load_megatron(folder)
    embedding = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    for size in ((10**12, 48), (10**15, 0)):
        huge = replace(embedding, size=torch.Size(size))
        for key in ("embedding.word_embeddings.weight", "decoder.layers.mlp.bias"):  # one stacked
            tensors = {**metadata.state_dict_metadata, key: huge}
            file = pickle.dumps(replace(metadata, state_dict_metadata=tensors))
            (path / ".metadata").write_bytes(file)
            with pytest.raises(mh.CheckpointError, match=f"{key} of shape .* have more numbers"):
                mh.load_megatron(folder)
    for place in metadata.storage_data.values():
        place.length = 10**15
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(mh.CheckpointError, match=r"0\.distcp cannot be read .MemoryError"):
        mh.load_megatron(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_pattern": "MK"}, "layers 'K' .Kimi Delta Attention."),
        ({"layer_pattern": "M*", "qk_layernorm": True}, "qk_layernorm=True"),
        ({"layer_pattern": "M", "mamba_conv_kernel": 3}, "mamba_conv_kernel=3"),
        ({"layer_pattern": "M*", "rotary_scaling": LLAMA3}, "rotary_scaling=.'rope_type': 'llama3"),
        ({"layer_pattern": "M-", "gated_linear_unit": False}, "activation_func='silu'"),
        ({**NO_GATE, "layer_pattern": "G", "activation_func": squared_relu}, "is squared_relu, w"),
        ({"layer_pattern": "M", "final_logit_softcap": 2.0}, "final_logit_softcap=2.0"),
        (
            {"layer_pattern": "MM", "layer_overrides": {"2": {"layernorm_epsilon": 1.0}}},
            "layernorm_epsilon=1.0 in layer 2",
        ),
    ],
)
def test_models_that_megatron_cannot_hold_are_not_written(fields, message, tmp_path):
    sizes = {"hidden_size": 48, "vocab_size": VOCAB, "num_attention_heads": 6}
    sizes |= {"mamba_head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    model = mh.build_hybrid_model(mh.HybridConfig(**sizes, **fields))
    with pytest.raises(mh.CheckpointError, match=message):
        save_megatron(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_convert_in_all_directions(tmp_path):
    """Around the circle of Hugging Face, Megatron, ours, Megatron and Hugging Face."""
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    first, _ = mh.load_pretrained(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    convert(tmp_path / "hf", tmp_path / "torch_dist", "torch_dist")
    convert(tmp_path / "torch_dist", tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "torch_dist2", "torch_dist")
    convert(tmp_path / "torch_dist2", tmp_path / "hf2", "huggingface", huggingface_config=config)
    convert(tmp_path / "hf2", tmp_path / "ours2", "ours")
    convert(tmp_path / "ours2", tmp_path / "hf3", "huggingface")
    for folder in ("ours", "hf2", "ours2", "hf3"):
        model, _ = mh.load_pretrained(tmp_path / folder)
        assert torch.equal(logits(model), logits(first))
    assert torch.equal(logits(mh.load_megatron(tmp_path / "torch_dist2")), logits(first))
    with torch.no_grad():
        theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf3")(TOKENS).logits
    close(logits(first), theirs)


def test_a_hugging_face_config_of_another_model_is_refused(tmp_path):
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "torch_dist", "torch_dist")
    text, other = (tmp_path / "hf" / "config.json").read_text(), tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1'))
    with pytest.raises(mh.CheckpointError, match="They are of different models"):
        convert(tmp_path / "torch_dist", tmp_path / "x", "huggingface", None, other)
    with pytest.raises(mh.CheckpointError, match="has a Hugging Face config of its own"):
        convert(tmp_path / "hf", tmp_path / "x", "ours", huggingface_config=tmp_path / "hf")


@pytest.mark.parametrize(
    ("name", "mark"), [(".metadata", b"final_norm"), ("common.pt", b""), ("__0_0.distcp", b"")]
)
def test_a_release_is_not_overwritten_and_flipped_bytes_are_found(tmp_path, name, mark):
    sizes = {"hidden_size": 48, "vocab_size": VOCAB, "mamba_head_dim": 16}
    model = mh.build_hybrid_model(mh.HybridConfig(layer_pattern="M", **sizes))
    save_megatron(model, tmp_path)
    with pytest.raises(mh.CheckpointError, match=r"cannot write a checkpoint to .* exists"):
        save_megatron(model, tmp_path)
    mh.load_megatron(tmp_path)
    file = tmp_path / "release" / name
    content = bytearray(file.read_bytes())
    content[content.index(mark) if mark else len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(mh.CheckpointError, match=f"{tmp_path}/release"):
        mh.load_megatron(tmp_path)
