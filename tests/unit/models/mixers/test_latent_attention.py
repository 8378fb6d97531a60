"""Multi-head latent attention: its two forms, and the attention that it is an economy of."""

import pytest
import torch
from small_models import random_tokens, small_model
from test_mixer_context import DictContext, run

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

VARIANTS = {
    "low-rank queries": {},
    "one query projection": {"q_lora_rank": None},
    "no rope": {"position_embedding_type": "none"},
    "interleaved rope": {"rotary_interleaved": True},
    "yarn": {
        "rotary_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "softmax_scale": 0.4,
    },
    "softcap": {"attention_logit_softcap": 3.0},
    "wide values": {"v_head_dim": 32, "kv_lora_rank": 8},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
@torch.inference_mode()
def test_attention_over_latents_equals_attention_of_expanded_heads(fields):
    model = small_model("+-+", **fields)
    tokens = random_tokens(2, 40)
    whole = model(tokens)
    context = DictContext(model.cache_requirements(), 2)
    for cuts in ({0: (0, 17), 1: (0, 30)}, {1: (30, 31), 0: (17, 40)}, {1: (31, 40)}):
        for (r, (start, end)), rows in zip(
            cuts.items(), run(model, context, tokens, cuts, padding=1)
        ):
            torch.testing.assert_close(rows, whole[r, start:end], atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [6, 5])  # rope could not rotate the second one
@torch.no_grad()
def test_equals_plain_attention_written_out(width):
    fields = {"position_embedding_type": "none", "qk_pos_emb_head_dim": width}
    model = small_model("+", **fields).double()
    mixer, length = model.decoder.layers[0].self_attention, 11
    for norm in (mixer.q_layernorm, mixer.kv_layernorm):
        norm.weight.normal_(1.0, 0.3)
    x = torch.randn(length, 48, dtype=torch.double)
    layout = RaggedLayout.uniform(1, length)
    output, _ = mixer(x, UncachedContext(layout, x.device))

    q = mixer.q_layernorm(x @ mixer.linear_q_down_proj.weight.T)
    q = mixer.linear_q_up_proj.weight @ q.T
    down = x @ mixer.linear_kv_down_proj.weight.T
    kv = mixer.linear_kv_up_proj.weight @ mixer.kv_layernorm(down[:, :28]).T
    heads = []
    for q_h, kv_h in zip(q.view(4, 10 + width, length), kv.view(4, 24, length)):
        scores = (q_h[:10].T @ kv_h[:10] + q_h[10:].T @ down[:, 28:].T) / (10 + width) ** 0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ kv_h[10:].T)
    expected = torch.cat(heads, 1) @ mixer.linear_proj.weight.T
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
