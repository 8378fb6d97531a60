"""Logits are the same to the bit in every cut, after every saved state, in every batch, in decodes
and in training; where they are not, `promises` says so."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from small_models import small_config, small_model

from benchmarks.bits import ONE, equal_rows, random_model
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, RequestOptions, SamplingParams
from megatron_hybrid.inference.inspection import reasons_of_config
from megatron_hybrid.training.lora import LoraFields, adapters_of, add_adapters, save_adapters

FP32 = pytest.param(torch.float32, marks=pytest.mark.bits)
"""With narrower vectors than the CPU's, torch's attention refuses bf16."""


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["MG*-W-", "SKL-", "AHUE", "CZB*Z"])
def test_logits_are_those_of_training(pattern, dtype):
    found = equal_rows(random_model(pattern, dtype), 3, np.random.default_rng(0))
    assert all(equal == rows > 0 for equal, rows in found)


@pytest.mark.parametrize("widths", [(24, 16), (16, 24)])
def test_logits_are_those_of_training_with_values_of_another_width(widths):
    sizes = dict(zip(("kv_channels", "value_channels"), widths, strict=True))
    found = equal_rows(random_model("*W", torch.float32, **sizes), 3, np.random.default_rng(0))
    assert all(equal == rows > 0 for equal, rows in found)


@pytest.mark.parametrize("rank", [1, 3])
def test_logits_with_an_adapter_are_those_of_training(tmp_path, rank):
    base = random_model("*-", torch.float32)
    engine = DynamicInferenceEngine(base, None, InferenceConfig(max_adapters=1))
    trained = deepcopy(base)
    add_adapters(trained, LoraFields(rank=rank, alpha=4.0))
    for projection in adapters_of(trained).values():
        torch.nn.init.normal_(projection.lora.b)
    save_adapters(trained, tmp_path)
    engine.adapters.load("a", tmp_path)
    (result,) = engine.generate(
        [[1, 2, 3]],
        SamplingParams(top_k=1, num_tokens_to_generate=8, return_log_probs=True),
        RequestOptions(adapter="a"),
    )
    tokens = torch.tensor([[1, 2, 3, *result.token_ids]])
    log_probs = trained(tokens)[0].log_softmax(-1).gather(-1, tokens[0, 1:, None])
    assert torch.equal(torch.tensor(result.log_probs), log_probs[2:, 0])


def promises(pattern, *, state_encoding="exact", **fields):
    config = InferenceConfig(cache_bytes=1 << 22, state_encoding=state_encoding)
    return DynamicInferenceEngine(small_model(pattern, **fields), None, config).promises()


def test_promises_name_what_rounds():
    assert promises("MGKASC*-", **ONE) == {"serving": [], "training": []}
    rounded = promises("M+", state_encoding="bf16", recurrent_state_dtype=torch.bfloat16)
    for reason in ("mamba_chunk_size is", "recurrent_state_dtype is", "state_encoding is"):
        assert sum(each.startswith(reason) for each in rounded["serving"]) == 1
    assert ["latent" in each for each in rounded["training"]] == [True]
    assert promises("C*", state_encoding="bf16") == {"serving": [], "training": []}
    noisy = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "moe_input_jitter_eps": 0.1}
    for pattern, names in (("C", 1), ("*", 2), ("*E", 3)):
        fields = {"num_moe_experts": 2} if "E" in pattern else {}
        given = dict(list(noisy.items())[:names])
        found = promises(pattern, **given, **fields)["training"]
        assert [each.partition(" ")[0] for each in found] == [*given]


@pytest.mark.parametrize(
    "pattern, sizes, counts",
    [
        ("*", (2, 1), (0, 0)),
        ("*", (4, 1), (1, 0)),
        ("E", (1, 2), (0, 1)),
        ("E", (2, 2), (1, 1)),
    ],
)
def test_promises_name_sums_of_ranks(pattern, sizes, counts):
    experts = {"num_moe_experts": 2} if pattern == "E" else {}
    names = "tensor_model_parallel_size", "expert_model_parallel_size"
    ranks = dict(zip(names, sizes, strict=True), sequence_parallel=sizes[0] > 1)
    config = small_config(pattern, params_dtype=torch.bfloat16, **experts, **ranks)
    assert (*map(len, reasons_of_config(config)),) == counts
    assert [len(reasons) for reasons in promises("K").values()] == [0, 1]
