"""Folders with packed weights: the model computes what one with the numbers that they stand for
computes, to the bit, and is written back byte by byte."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import packed_folders
import pytest
import torch
from huggingface import build, with_stacked_experts
from matrix import matrix_rows
from model_folders import rewrite
from packed_folders import FORMATS, stored_bytes, write_folders
from reference import greedy, tiny_engine
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    save_huggingface,
)
from megatron_hybrid.inference.weights.change_detector import WeightWatch
from megatron_hybrid.inference.weights.fingerprint import weights_hash
from megatron_hybrid.models.flops import layer_widths, token_flops
from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.tools.quantize import quantize
from megatron_hybrid.training.lora import LoraFields, adapters_of, add_adapters, merge_adapters

PROJECTIONS = (
    r"((q|k|v|o|gate|up|down)_proj|in_proj_(qkvz|qkv|z)|(in|out)_proj|latent_proj|experts\.\d+\.\w+"
    r"|w[123]|kv_a_proj_with_mqa|[qk]v?_[ab]_proj)$"
)
NEMOTRON = {
    r"experts\.\d+\.\w+$": "modelopt-nvfp4",
    r"(in|out)_proj$|shared_experts": "modelopt-fp8",
}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
PAIRS = {
    "qwen3_next": {PROJECTIONS: "fp8-block"},  # betas and decays of a fused projection stay in bf16
    "qwen3_5": {PROJECTIONS: "fp8-block"},
    "qwen3_moe": {PROJECTIONS: "fp8-block"},
    "mimo_v2_flash": {PROJECTIONS: "fp8-block"},
    "bailing_hybrid": {PROJECTIONS: "fp8-block"},
    "step3": {PROJECTIONS: "fp8-block"},
    "step3p5": {PROJECTIONS: "fp8-block"},
    "qwen3_5_moe": {PROJECTIONS: "fp8-small-blocks"},  # experts one by one
    "deepseek_v3": {PROJECTIONS: "fp8-small-blocks"},  # latent attention's absorbed projection
    "minimax_m2": {PROJECTIONS: "fp8-block-ue8m0"},
    "kimi_linear": {PROJECTIONS: "ct-fp8-channel"},
    "glm4_moe": {PROJECTIONS: "ct-fp8-channel"},
    "cohere2": {PROJECTIONS: "ct-fp8-channel"},
    "granitemoehybrid": {PROJECTIONS: "ct-int8"},
    "nemotron_h": {PROJECTIONS: "modelopt-fp8"},
    "nemotron_h_moe": NEMOTRON,
    "nemotron_h_puzzle": NEMOTRON,
    "gemma4_experts": {PROJECTIONS: "modelopt-nvfp4"},
    "exaone4": {PROJECTIONS: "awq"},
    "jamba": {PROJECTIONS: "ct-w8a16"},
}
"""Formats that models of these architectures are published in."""


def folders(tmp_path: Path, name: str, formats: dict[str, str], **changes) -> tuple[Path, Path]:
    """A tiny model in bf16, packed, and as what it stands for."""
    source = tmp_path / "source"
    build(name, **changes).to(torch.bfloat16).save_pretrained(source)
    return write_folders(source, tmp_path, formats, MIXED if formats is NEMOTRON else None)


@pytest.fixture(scope="module")
def folders_in(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """`folders` of a model by format, written once."""

    @functools.cache
    def written(kind):
        name = "qwen3_next" if kind == "fp8-block" else "llama"
        return folders(tmp_path_factory.mktemp(kind), name, {PROJECTIONS: kind})

    return written


@pytest.fixture(scope="module")
def qwen(folders_in) -> tuple[Path, Path]:
    """Gated DeltaNet, experts and attention in FP8."""
    return folders_in("fp8-block")


@torch.no_grad()
def logits(model: mh.HybridModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, model.vocab_size, (1, 33), generator=generator)
    return model(tokens, torch.arange(33)[None], None)


def assert_same_model(packed: Path, plain: Path, target: Path) -> mh.HybridModel:
    """The packed folder computes what the other one does, and comes back as it was."""
    model, _ = mh.load_pretrained(packed)
    assert any(isinstance(module, PackedWeight) for module in model.modules())
    torch.testing.assert_close(logits(model), logits(mh.load_pretrained(plain)[0]), rtol=0, atol=0)
    save_huggingface(model, target)
    assert stored_bytes(target) == stored_bytes(packed)
    config = json.loads((target / "config.json").read_text())
    assert (
        config["quantization_config"]
        == json.loads((packed / "config.json").read_text())["quantization_config"]
    )
    return model


ODD_SIZES = [
    ("gptq", {"intermediate_size": 80}),  # the last group has fewer columns
    # Two rows of 256 columns have as many scales by rows as by blocks of 128 x 128.
    (
        "ct-fp8-channel",
        {"hidden_size": 256, "num_attention_heads": 128, "head_dim": 2, "num_key_value_heads": 1},
    ),
]


@pytest.mark.parametrize(("kind", "sizes"), [*((kind, {}) for kind in FORMATS), *ODD_SIZES])
def test_each_format_computes_what_it_stands_for(tmp_path, kind, sizes):
    packed, plain = folders(tmp_path, "llama", {PROJECTIONS: kind}, **sizes)
    assert_same_model(packed, plain, tmp_path / "back")


@pytest.mark.parametrize(
    "name", matrix_rows(list(PAIRS), "qwen3_next", "deepseek_v3", "nemotron_h_moe")
)
def test_published_pairs_compute_what_they_stand_for(tmp_path, name):
    packed, plain = folders(tmp_path, name, PAIRS[name])
    model = assert_same_model(packed, plain, tmp_path / "back")
    other, _ = mh.load_pretrained(plain)
    assert token_flops(model) == token_flops(other)  # which eviction weighs by
    assert layer_widths(model) == pytest.approx(layer_widths(other))
    assert sum(p.nbytes for p in model.parameters()) < sum(p.nbytes for p in other.parameters())
    save_checkpoint(model, tmp_path / "ours")
    again, _ = mh.load_pretrained(tmp_path / "ours")
    assert weights_hash(again) == weights_hash(model)
    with pytest.raises(CheckpointError, match="from that folder"):
        save_huggingface(again, tmp_path / "theirs")


@pytest.mark.parametrize(
    "formats",
    [
        {r"(q|k|o|gate|up|down)_proj$": "fp8-block"},
        {r"(q|k|o|gate|up|down)_proj$": "gptq"},
        {r"(k|v|o|up|down)_proj$": "ct-nvfp4"},
        {r"(q|k)_proj$": "ct-fp8-channel", r"(v|o|gate|up|down)_proj$": "ct-int8"},
    ],
)
def test_rows_that_are_packed_otherwise_than_others_are_unpacked(tmp_path, formats, caplog):
    packed, plain = folders(tmp_path / "old", "llama", formats)
    model = assert_same_model(packed, plain, tmp_path / "same")
    assert "layers.0.self_attention.linear_qkv.weight is not packed" in caplog.text
    tensors = load_file(plain / "model.safetensors")
    engine = tiny_engine(model)
    engine.load_weights({name: tensor * 2 for name, tensor in tensors.items()})
    save_huggingface(model, tmp_path / "new")
    found, before = stored_bytes(tmp_path / "new"), stored_bytes(packed)
    assert found.keys() == before.keys()
    again, _ = mh.load_pretrained(tmp_path / "new")
    weights = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        if name.endswith("linear_qkv.weight"):
            error = (weights[name] - parameter).float().norm() / parameter.float().norm()
            assert error < 0.2


def test_experts_in_mxfp4_compute_what_they_stand_for(tmp_path):
    """GPT-OSS, whose packed experts have outputs as rows and its others inputs."""
    source = tmp_path / "source"
    build("gpt_oss", hidden_size=64, intermediate_size=64).to(torch.bfloat16).save_pretrained(
        source
    )
    packed, plain = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        packed[name] = plain[name] = weight
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored, values = packed_folders.mxfp4(weight.double().mT)
            del packed[name]
            packed |= {f"{name}_{part}": tensor for part, tensor in stored.items()}
            plain[name] = values.mT.to(weight.dtype).contiguous()
    method = {"quant_method": "mxfp4"}
    rewrite(source, lambda _: packed, tmp_path / "packed", quantization_config=method)
    rewrite(source, lambda _: plain, tmp_path / "plain")
    assert_same_model(tmp_path / "packed", tmp_path / "plain", tmp_path / "back")


STACKED = {
    "qwen3_5_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
    "llama4": {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2},
}
"""Architectures whose folders in floating point have the experts of a layer in one tensor."""


def _stack(experts: list[torch.Tensor], name: str, is_gated: bool) -> torch.Tensor:
    """Projections of experts as the folder in floating point has them."""
    if name == "qwen3_5_moe":
        return torch.stack(experts)
    whole = torch.stack(experts).mT
    if name == "gpt_oss" and is_gated:  # the gates at even places
        whole = torch.stack(whole.chunk(2, -1), -1).flatten(-2)
    return whole.contiguous()


def _dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of channel FP8, or of integers of 4 bits in groups of 32."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            codes = (tensor.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
            scale = tensors[name.replace("_packed", "_scale")].repeat_interleave(32, 1)
            value = (codes.flatten(-2) - 8).float() * scale.float()
            found[name.removesuffix("_packed")] = value.bfloat16()
        elif tensor.dtype == torch.float8_e4m3fn:
            found[name] = (tensor.float() * tensors[f"{name}_scale"]).bfloat16()
        elif not name.endswith(("_scale", "_shape")):
            found[name] = tensor
    return found


@pytest.mark.parametrize(
    ("name", "to"),
    matrix_rows(
        [(n, to) for n in STACKED for to in ("int4", "fp8")], *((n, "int4") for n in STACKED)
    ),
)
def test_stacked_experts_are_quantized_one_by_one(tmp_path, name, to):
    source = tmp_path / "source"
    build(name, **STACKED[name]).to(torch.bfloat16).save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    if name == "qwen3_5_moe":  # transformers writes them one by one, those of Qwen are not
        tensors = with_stacked_experts(tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    report = quantize(source, tmp_path / "packed", to)
    assert {"mlp.experts.linear_fc1", "mlp.experts.linear_fc2"} <= report.quantized.keys()
    assert not any("experts" in reason for reason in report.kept)
    plain = _dequantized(load_file(tmp_path / "packed" / "model.safetensors"))
    for key, before in tensors.items():
        prefix, found, kind = key.partition(".experts.")
        if not found:
            continue
        is_gated, ending = "gate" in kind, "bias" if kind.endswith("_bias") else "weight"
        names = ("gate_proj", "up_proj") if is_gated else ("down_proj",)
        experts = [
            torch.cat([plain.pop(f"{prefix}.experts.{i}.{each}.{ending}") for each in names])
            for i in range(len(before))
        ]
        if ending == "weight":
            plain[key] = _stack(experts, name, is_gated)
            error = (plain[key] - before).float().norm() / before.float().norm()
            assert error < {"int4": 0.13, "fp8": 0.04}[to]
        else:
            plain[key] = torch.stack(experts).unflatten(1, (len(names), -1)).mT.flatten(1)
            assert torch.equal(plain[key], before)
    rewrite(source, lambda _: plain, tmp_path / "plain")
    assert_same_model(tmp_path / "packed", tmp_path / "plain", tmp_path / "back")
    if name == "qwen3_5_moe":
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "packed", quantization_config=CompressedTensorsConfig(dequantize=True)
        )
        state = theirs.state_dict()
        for key, value in plain.items():
            if ".experts." in key:
                torch.testing.assert_close(state[key], value, rtol=2.0**-7, atol=1e-6)


def test_writes_to_codes_and_to_scales_change_the_model(qwen):
    model, _ = mh.load_pretrained(qwen[0])
    weight = next(module for module in model.modules() if isinstance(module, PackedWeight))
    for part in (weight.codes, weight.scale):
        watch, before = WeightWatch(model), weights_hash(model)
        with torch.no_grad():
            part.view(torch.uint8)[0] += 1
        assert watch.has_changed() and weights_hash(model) != before


def test_adapters_beside_packed_weights_learn_and_are_not_merged(qwen):
    model, _ = mh.load_pretrained(qwen[0])
    before = logits(model)
    add_adapters(model, LoraFields(rank=4))
    assert torch.equal(logits(model), before)  # B begins at 0
    tokens = torch.arange(3, 35)[None]
    model(tokens, torch.arange(32)[None], None).float().square().mean().backward()
    learnt = [module.lora.b.grad for module in adapters_of(model).values()]
    assert learnt and all(grad is not None and bool(grad.any()) for grad in learnt)
    with pytest.raises(ValueError, match=r"adapters cannot be merged: .*packed"):
        merge_adapters(model)


Q = "model.layers.3.self_attn.q_proj.weight"
SCALE = f"{Q}_scale_inv"
LLAMA_Q = "model.layers.0.self_attn.q_proj.weight"
ROUTER = "model.layers.0.mlp.gate"


def _packed_router(tensors):
    stored, _ = FORMATS["fp8-block"][0](tensors[f"{ROUTER}.weight"].double())
    return tensors | {f"{ROUTER}.{part}": tensor for part, tensor in stored.items()}


def _with_nan(tensors):
    codes = tensors[Q].clone()
    codes.view(torch.uint8)[3, 5] = 0x7F
    return tensors | {Q: codes}


def _with(name, tensor):
    return lambda tensors: tensors | {name: tensor}


def _without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def _in_e5m2(tensors):
    return tensors | {Q: tensors[Q].to(torch.float8_e5m2)}


def _in_another_order(tensors):
    return {n: x.flip(0) if "g_idx" in n else x for n, x in tensors.items()}


OTHER_GROUPS = {"quantization_config": FORMATS["gptq"][1] | {"group_size": 16}}
OUTER = f"{LLAMA_Q}_global_scale"


@pytest.mark.parametrize(
    ("kind", "change", "config", "words"),
    [
        ("fp8-block", dict, {"quantization_config": None}, "neither config.json nor"),
        ("fp8-block", _without(SCALE), {}, f"{Q} is torch.float8_e4m3fn in .*without {Q}_scale"),
        ("fp8-block", _with(SCALE, torch.ones(3, 5)), {}, "scales of shape .3, 5."),
        ("fp8-block", _with(SCALE, torch.ones(1, 1).long()), {}, "no format that is read"),
        ("fp8-block", _in_e5m2, {}, f"{Q} has codes of .*e5m2 .* no format"),
        ("fp8-block", _with_nan, {}, f"{Q} has numbers that are NaN"),
        ("fp8-block", _packed_router, {}, "needs it unpacked"),
        ("gptq", _in_another_order, {}, "desc_act"),
        ("gptq", dict, OTHER_GROUPS, "not put 96 columns into groups of 16,"),
        # What a number is divided by: 1 / 0 times a code of 0 is NaN.
        *(
            (
                "ct-nvfp4",
                _with(OUTER, torch.tensor([scale])),
                {},
                f"{OUTER}, times a code of 0, has .* NaN",
            )
            for scale in (0.0, -0.0, 1e-45)
        ),
        *(
            (kind, _with(LLAMA_Q, torch.zeros(shape)), {}, f"{LLAMA_Q} is in .* twice")
            for kind in ("ct-nvfp4", "gptq")
            for shape in ((64, 64), (3, 5))
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_unpacked_is_refused(folders_in, tmp_path, kind, change, config, words):
    folder = rewrite(folders_in(kind)[0], change, tmp_path / "folder", **config)
    with pytest.raises(CheckpointError, match=words):
        mh.load_pretrained(folder)


def test_modelopt_may_name_the_quantization_in_a_file_of_its_own(tmp_path):
    packed, plain = folders(tmp_path, "llama", {PROJECTIONS: "modelopt-fp8"})
    values = json.loads((packed / "config.json").read_text())
    config = values.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(values))
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": config["quant_algo"]},
    }
    (packed / "hf_quant_config.json").write_text(json.dumps(content))
    model, _ = mh.load_pretrained(packed)
    assert torch.equal(logits(model), logits(mh.load_pretrained(plain)[0]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_next", "fp8-block"),
        ("qwen3_next", "ct-nvfp4"),
        ("llama", "ct-w4a16-asymmetric"),
        ("llama", "modelopt-fp8"),
    ],
)
def test_new_weights_are_quantized_when_they_arrive(tmp_path, name, kind):
    """An engine with packed weights takes a trainer's in bf16, and is that of their folder then."""
    old, _ = folders(tmp_path / "old", name, {PROJECTIONS: kind}, seed=1)
    build(name, seed=2).to(torch.bfloat16).save_pretrained(tmp_path / "new")
    engine = tiny_engine(mh.load_pretrained(old)[0])
    before = weights_hash(engine.model)
    engine.load_weights(load_file(tmp_path / "new" / "model.safetensors"))
    assert weights_hash(engine.model) != before
    new, _ = mh.load_pretrained(tmp_path / "new")
    expected = dict(new.named_modules())
    for name, weight in engine.model.named_modules():
        if isinstance(weight, PackedWeight):
            found, wanted = weight.unpacked(), expected[name.removesuffix(".weight")].weight
            error = (found - wanted).float().norm() / wanted.float().norm()
            assert error < (0.05 if "fp8" in kind else 0.2)
            assert weight.rest is None or torch.equal(weight.rest, wanted[-len(weight.rest) :])
    save_huggingface(engine.model, tmp_path / "back")
    again = dict(mh.load_pretrained(tmp_path / "back")[0].named_modules())
    for name, weight in engine.model.named_modules():
        if isinstance(weight, PackedWeight):
            torch.testing.assert_close(weight.unpacked(), again[name].unpacked())
    names = stored_bytes(tmp_path / "back").keys()
    assert names == stored_bytes(old).keys()


def test_an_output_layer_may_be_packed_and_a_word_embedding_not(tmp_path):
    packed, plain = folders(tmp_path / "head", "llama", {r"lm_head$|_proj$": "ct-w8a16"})
    model = assert_same_model(packed, plain, tmp_path / "back")
    assert isinstance(model.output_layer.weight, PackedWeight)
    packed, _ = folders(tmp_path / "tied", "llama_tied", {r"embed_tokens$": "ct-w8a16"})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is packed .* row by row"):
        mh.load_pretrained(packed)


def test_a_model_with_vision_keeps_its_names_in_the_quantization(tmp_path):
    flat, plain = folders(tmp_path, "qwen3_5", {PROJECTIONS: "ct-nvfp4"})

    def nested(tensors):
        return {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}

    values = json.loads((flat / "config.json").read_text())
    quantization = values.pop("quantization_config")
    quantization["ignore"] = ["lm_head", "model.language_model.layers.0.linear_attn.in_proj_b"]
    config = {"model_type": "qwen3_5", "text_config": {**values, "model_type": "qwen3_5_text"}}
    (folder := tmp_path / "composite").mkdir()
    save_file(nested(load_file(flat / "model.safetensors")), folder / "model.safetensors")
    config |= {"quantization_config": quantization, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = mh.load_pretrained(folder)
    assert torch.equal(logits(model), logits(mh.load_pretrained(plain)[0]))
    save_huggingface(model, tmp_path / "back")
    assert stored_bytes(tmp_path / "back") == stored_bytes(flat)
    written = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert written["ignore"] == ["lm_head", "model.layers.0.linear_attn.in_proj_b"]
    again = {"language_model.lm_head.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"lm_head.weight is in .* twice"):
        mh.load_pretrained(rewrite(folder, lambda tensors: tensors | again, tmp_path / "twice"))


def test_a_packed_model_takes_a_folder_that_is_packed_otherwise_or_not(qwen, tmp_path):
    model, _ = mh.load_pretrained(qwen[0])
    other, plain = folders(tmp_path, "qwen3_next", {r"[qkv]_proj$": "ct-int8"}, seed=3)
    for folder in (other, plain, qwen[0]):
        load_checkpoint(model, folder)
        expected, _ = mh.load_pretrained(folder)
        assert weights_hash(model) == weights_hash(expected)
        assert torch.equal(logits(model), logits(expected))
    save_checkpoint(mh.load_pretrained(plain)[0], tmp_path / "ours")
    load_checkpoint(model, tmp_path / "ours")
    assert torch.equal(logits(model), logits(mh.load_pretrained(plain)[0]))


def test_an_engine_takes_a_folder_that_is_packed_as_its_model(qwen, tmp_path):
    """As it is, to the bit: nothing is rounded anew."""
    new, plain = folders(tmp_path, "qwen3_next", {PROJECTIONS: "fp8-block"}, seed=4)
    other, _ = folders(tmp_path / "other", "qwen3_next", {PROJECTIONS: "ct-int8"})
    engine = tiny_engine(mh.load_pretrained(qwen[0])[0])
    before = weights_hash(engine.model)
    unpacked = tiny_engine(mh.load_pretrained(qwen[1])[0])
    for each, folder, words in (
        (engine, other, "is packed .*int8.* but packed .*float8_e4m3fn.* in the model"),
        (unpacked, new, "is packed .* but not packed in the model"),
        (engine, rewrite(new, _with_nan, tmp_path / "nan"), "NaN"),
    ):
        each.start_weight_update()
        with pytest.raises(CheckpointError, match=words):
            each.receive_weights({"path": str(folder)})
        assert not each.awaits_weights  # nothing was written
    assert weights_hash(engine.model) == before
    engine.start_weight_update()
    engine.receive_weights({"path": str(new)})
    engine.finish_weight_update()
    expected, _ = mh.load_pretrained(new)
    assert weights_hash(engine.model) == weights_hash(expected)
    prompt = [list(range(3, 40))]
    found = engine.generate(prompt, greedy(4))[0].token_ids
    assert (
        found == tiny_engine(mh.load_pretrained(plain)[0]).generate(prompt, greedy(4))[0].token_ids
    )
    save_huggingface(engine.model, tmp_path / "back")
    assert stored_bytes(tmp_path / "back") == stored_bytes(new)


def test_one_packed_weight_under_two_names(qwen):
    engine = tiny_engine(mh.load_pretrained(qwen[0])[0])
    name = "decoder.layers.6.self_attention.linear_proj.weight"
    theirs = "model.layers.3.self_attn.o_proj.weight"
    value = torch.randn(engine.model.get_submodule(name).shape).bfloat16()
    engine.load_weights([(name, value), (theirs, value)])
    with pytest.raises(CheckpointError, match="differs from what was given before"):
        engine.load_weights([(name, value), (theirs, value + 1)])


def test_scales_of_keys_and_values_alone_are_no_quantized_weights(qwen, tmp_path):
    names = ("k_proj.k_scale", "kv_scale", "prob_output_scale", "q_proj.activation_scale")
    scale = {f"model.layers.3.self_attn.{name}": torch.tensor(0.5) for name in names}
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    folder = rewrite(qwen[1], lambda t: t | scale, tmp_path / "folder", quantization_config=config)
    model, _ = mh.load_pretrained(folder)
    assert torch.equal(logits(model), logits(mh.load_pretrained(qwen[1])[0]))
    save_huggingface(model, tmp_path / "back")
    assert stored_bytes(tmp_path / "back") == stored_bytes(folder)
