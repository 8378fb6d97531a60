"""Training by kernels: the gradients are those of plain torch."""

import pytest
import torch
from reference import greedy, tiny_engine
from saved_tensors import Saved
from small_models import packed_params, random_tokens, small_config

from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.saved_bytes import count_saved_bytes, planned_model
from megatron_hybrid.ops import dispatch

FIELDS = dict(hidden_size=64, mamba_chunk_size=16, linear_chunk_size=32)
CAPPED = dict(attention_logit_softcap=2.0, sliding_window=20)
SERVED = {
    "M": ("ssd_scan", "mcore", True, 0.35),
    "G": ("gated_delta_rule", "fla", True, 0.25),
    "K": ("kimi_delta_attention", "fla", True, 0.25),
    "S": ("selective_scan", "triton", True, 0.6),
    "C-": ("causal_conv1d", "triton", True, 0.8),
    "*": ("rotate_heads", "triton", False, 1.04),
}
"""Pattern of layers -> an op of theirs, the backend that has to serve it, whether the gradient is a
kernel's, and what is kept as a share of plain torch's. Queries and keys are kept before their
rotation, too; in 16 bits the share of attention is 0.81."""


@pytest.mark.usefixtures("loops_over_tensors")
@pytest.mark.parametrize("pattern", SERVED)
def test_a_step_by_kernels_has_the_gradients_of_plain_torch(pattern, monkeypatch):
    config = small_config(pattern, **FIELDS)
    torch.manual_seed(0)
    model = build_hybrid_model(config).train()
    tokens, served, results = random_tokens(1, 71), set(), []
    kept: list[int] = []
    packed = packed_params(0, 1, 40, 68)

    def run(op, backend, inputs, original=dispatch.Op._run):
        served.add((op.name, backend.name, backend.again(*inputs) is not None))
        return original(op, backend, inputs)

    monkeypatch.setattr(dispatch.Op, "_run", run)
    for forced in ("reference", None):
        monkeypatch.setattr(dispatch, "forced", forced)
        saved = Saved(model)
        with saved.counted():
            losses = model(tokens[:, :-1], labels=tokens[:, 1:], packed_seq_params=packed)
        kept.append(saved.bytes())
        gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
        results.append((losses, *gradients))
    *serving, share = SERVED[pattern]
    assert tuple(serving) in served and kept[1] < share * kept[0]
    planned = count_saved_bytes(planned_model(config, 1, 0), 1, 70, "cuda")
    assert planned.total == pytest.approx(kept[1], rel=0.05)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("pattern, fields", [("MGK", {}), ("SC-U", {}), ("*W", CAPPED)])
def test_packed_rows_have_the_bits_of_a_prefill(pattern, fields):
    torch.manual_seed(0)
    model, rows = build_hybrid_model(small_config(pattern, **FIELDS, **fields)), []
    model.decoder.register_forward_hook(lambda *call: rows.append(call[-1].detach()))
    prompts = [random_tokens(1, n)[0].tolist() for n in (40, 3, 27)]
    tiny_engine(model.eval(), prefix_caching="off").generate(prompts, greedy(1))
    packed = packed_params(0, 40, 43, 70)
    tokens = torch.tensor([[token for prompt in prompts for token in prompt]])
    assert model.train()(tokens, labels=tokens, packed_seq_params=packed).requires_grad
    assert torch.equal(rows[-1][:70], rows[0][:70])
