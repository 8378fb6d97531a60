"""Logits are the same to the bit in every cut, after every saved state, in every batch, in decodes
and in training; where they are not, `promises` says so."""

import numpy as np
import pytest
import torch
from small_models import small_model

from benchmarks.bits import ONE, equal_rows, random_model
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig

FP32 = pytest.param(torch.float32, marks=pytest.mark.bits)
"""With narrower vectors than the CPU's, torch's attention refuses bf16."""


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["MG*-W-", "SKL-", "AHUE", "CZB*Z"])
def test_logits_are_those_of_training(pattern, dtype):
    found = equal_rows(random_model(pattern, dtype), 3, np.random.default_rng(0))
    assert all(equal == rows > 0 for equal, rows in found)


def promises(pattern, *, state_encoding="exact", **fields):
    config = InferenceConfig(cache_bytes=1 << 22, state_encoding=state_encoding)
    return DynamicInferenceEngine(small_model(pattern, **fields), None, config).promises()


def test_promises_name_what_rounds():
    assert promises("MGKASC*-", **ONE) == {"serving": [], "training": []}
    rounded = promises("M+", state_encoding="bf16", recurrent_state_dtype=torch.bfloat16)
    for reason in ("mamba_chunk_size is", "recurrent_state_dtype is", "state_encoding is"):
        assert sum(each.startswith(reason) for each in rounded["serving"]) == 1
    assert ["latent" in each for each in rounded["training"]] == [True]
    assert [len(reasons) for reasons in promises("K").values()] == [0, 1]
