"""`megatron-hybrid quantize`: weights to nearest, in folders that we and others load."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from model_folders import rewrite
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import CheckpointError
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.cli import main
from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.tools.convert import convert
from megatron_hybrid.tools.plan import packed_folder, plan, read_model_config
from megatron_hybrid.tools.quantize import FORMATS, compare, quantize

ALICE = Path(__file__).parents[2] / "functional" / "data" / "alice_chapter_5.txt"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A folder of transformers in bf16."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False, dtype="bfloat16")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def steps(weight: PackedWeight) -> torch.Tensor:
    """The widest step between the codes of each number of a weight, as numbers."""
    scale = weight.scale.double() * (1.0 if weight.outer is None else weight.outer.double())
    per_scale = {torch.float8_e4m3fn: 32.0, torch.int8: 1.0, torch.uint8: 1.0}[weight.codes.dtype]
    if weight.scale.dtype == torch.float8_e4m3fn:
        per_scale = 2.0  # of e2m1, between 4 and 6
    return (scale * per_scale).repeat_interleave(weight.shape[-1] // scale.shape[-1], -1)


TOKENS = torch.arange(3, 43)[None]


@torch.no_grad()
def logits_as_of_transformers(folder: Path) -> torch.Tensor:
    """Ours of a folder, which have to be transformers' of it."""
    ours, _ = mh.load_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = ours(TOKENS)
    torch.testing.assert_close(found, theirs(TOKENS, use_cache=False).logits, rtol=0, atol=0.02)
    return found


@pytest.mark.parametrize("to", FORMATS)
def test_each_weight_is_rounded_to_nearest_and_transformers_reads_it(llama, tmp_path, to):
    report = quantize(llama, tmp_path / "out", to)
    model, _ = mh.load_pretrained(tmp_path / "out")
    original, _ = mh.load_pretrained(llama)
    plain = dict(original.named_modules())
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedWeight)}
    assert len(packed) == 8  # qkv, the output projection and two of the MLP, in two layers
    for name, weight in packed.items():
        before = plain[name.removesuffix(".weight")].weight.double()
        error = (weight.unpacked().double() - before).abs()
        # bf16 rounds the numbers once more, and the scales of int4 and nvfp4 are rounded, too.
        slack = 0.6 if to in ("fp8", "int8") else 0.75
        assert bool((error <= slack * steps(weight) + before.abs() * 2.0**-8).all())
    assert report.bytes_after == sum(
        t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    assert report.bytes_after < 0.66 * report.bytes_before
    for kind in report.quantized.values():
        assert 0 < kind.error < {"fp8": 0.03, "int8": 0.012}.get(to, 0.13)
    found = logits_as_of_transformers(tmp_path / "out")
    with torch.no_grad():
        assert not torch.equal(found, original(TOKENS))


def test_a_tied_model_is_read_by_transformers_too(tmp_path):
    """Its head has no tensor, and must be named as one that is not quantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, dtype="bfloat16")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tied")
    quantize(tmp_path / "tied", tmp_path / "out", "fp8")
    logits_as_of_transformers(tmp_path / "out")


def test_parts_that_steer_states_stay_as_they_are(tmp_path, capsys):
    assert main(["quantize", "demo", str(tmp_path / "out"), "--to", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "decays, steps and betas" in printed and "bytes before" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80  # the last one has the path
    before = own_tensors(mh.load_pretrained("demo")[0])
    after = own_tensors(mh.load_pretrained(tmp_path / "out")[0])
    same = [name for name in before if name in after]
    assert {name.rpartition(".")[2] for name in same} >= {"A_log", "dt_bias", "D"}
    assert all(torch.equal(before[name], after[name]) for name in same)
    rest = {name: tensor for name, tensor in after.items() if name.endswith(".rest")}
    assert rest
    for name, rows in rest.items():
        assert torch.equal(rows, before[name.removesuffix(".rest")][-len(rows) :])
    ids = mh.load_pretrained("demo")[1].encode(ALICE.read_text())[:256]
    found = compare("demo", tmp_path / "out", ids)
    assert 0 < found["kl"] < 1e-3
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=0.02)
    assert found["same_top_1"] > 0.95


def compressed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """NVFP4 by compressed-tensors: its scales, its codes."""
    float8 = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
    kind = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    arguments = QuantizationArgs(**kind, **float8)
    divisor = generate_gparam(weight.amin(), weight.amax())
    groups = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, divisor)
    parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    return NVFP4PackedCompressor.compress(parts, scheme)


def test_nvfp4_has_the_bits_of_compressed_tensors(llama, tmp_path):
    """Ties, groups of zeros, tiny numbers, signs of zero; a weight of zeros alone."""
    tensors = load_file(llama / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight")]
    odd = [
        lambda w: (w * 64).round() / 4,
        lambda w: w * (torch.arange(w.shape[1]) // 16 % 3 > 0),
        lambda w: w * 1e-30,
        lambda w: w * 0,
        lambda w: w * 10.0 ** (torch.arange(len(w))[:, None] % 9 - 6),
    ]
    for name, change in zip(names, odd * 3):
        tensors[name] = change(tensors[name].float()).bfloat16()
    folder = rewrite(llama, lambda _: tensors, tmp_path / "odd")
    quantize(folder, tmp_path / "out", "nvfp4")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in names:
        for part, expected in compressed(tensors[name].float()).items():
            found = written[f"{name.removesuffix('.weight')}.{part}"]
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), (name, part)


def test_nan_is_not_quantized(llama, tmp_path):
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        tensors = load_file(llama / "model.safetensors")
        tensors[name].view(-1)[7] = torch.nan
        folder = rewrite(llama, lambda _, own=tensors: own, tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} has numbers that are NaN"):
            quantize(folder, tmp_path / "out", "int4")
        assert not list((tmp_path / "out").glob("*"))
        with pytest.raises(CheckpointError, match=f"{name} has numbers that are NaN"):
            convert(folder, tmp_path / "ours", "ours")


def test_what_cannot_be_quantized_is_refused(llama, tmp_path):
    quantize(llama, tmp_path / "out", "fp8")
    with pytest.raises(CheckpointError, match="not empty"):
        quantize(llama, tmp_path / "out", "fp8")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize(tmp_path / "out", tmp_path / "again", "int8")
    assert not (tmp_path / "again").exists()
    assert json.loads((llama / "config.json").read_text()).get("quantization_config") is None


@pytest.mark.parametrize("to", FORMATS)
def test_plan_counts_the_bytes_of_the_quantized_folder(tmp_path, to):
    quantize("demo", tmp_path / "out", to)
    model, _ = mh.load_pretrained(tmp_path / "out")
    planned = plan(read_model_config("demo"), 10**9, 1000, weights=to)
    assert planned.weight_bytes == sum(p.nbytes for p in model.parameters())
    folder = packed_folder(tmp_path / "out")
    found = plan(read_model_config(folder), 10**9, 1000, folder=folder)
    assert found.weight_bytes == planned.weight_bytes and found.counts_packed
    assert planned.parameters == plan(read_model_config("demo"), 10**9, 1000).parameters
