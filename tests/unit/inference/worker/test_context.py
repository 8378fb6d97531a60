"""The context under a module that we did not write: megatron-core's own SelfAttention."""

import numpy as np
import pytest
import torch
from differential import LogitsRecorder
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import attention as attention_module
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.ops import AttentionPattern, paged_attention
from megatron_hybrid.ops.ragged import RaggedLayout


class NaiveFlash:
    """In the place of flash-attn: plain softmax over what key_value_cache, cu_query_lengths and
    cu_kv_lengths of the context describe."""

    def flash_decode_and_prefill(
        self, q, k, v, max_q, max_k, cu_q, cu_k, kv_lengths, block_table, *args, **kwargs
    ):
        out = torch.zeros_like(q)
        q_flat, out_flat = q.reshape(-1, *q.shape[-2:]), out.view(-1, *q.shape[-2:])
        block = k.shape[1]
        for r, kv_length in enumerate(kv_lengths.tolist()):
            first, last = cu_q[r].item(), cu_q[r + 1].item()
            pages = block_table[r, : -(-kv_length // block)].long()
            keys = k[pages].flatten(0, 1)[:kv_length]
            values = v[pages].flatten(0, 1)[:kv_length]
            repeat = q.shape[-2] // keys.shape[1]
            keys, values = (t.repeat_interleave(repeat, dim=1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q_flat[first:last], keys)
            scores = scores / q.shape[-1] ** 0.5
            position = torch.arange(kv_length - (last - first), kv_length)
            future = torch.arange(kv_length)[None] > position[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            out_flat[first:last] = torch.einsum("hqk,khd->qhd", weights, values)
        return out


class StockAttention(NaiveFlash, SelfAttention):
    """megatron-core's attention with all of its own path up to the kernel."""


def test_stock_attention_runs_on_the_context(monkeypatch):
    """The mixer of a `*` layer is swapped for core's SelfAttention with the same weights; the
    engine's answers stay what they were, over prefill, chunks, decode and a shared prefix."""
    from megatron.core.inference import utils as inference_utils

    model = tiny_model("*-*-")
    prompts = [random_tokens(50), [*random_tokens(50)[:40], 1, 2, 3], random_tokens(7, seed=1)]
    params = greedy(6, return_log_probs=True, skip_prompt_log_probs=True)
    expected = tiny_engine(model, max_tokens=24).generate(prompts, params)

    config = model.config
    rotary = RotaryEmbedding(
        config.kv_channels, 1.0, rotary_base=config.rotary_base, use_cpu_initialization=True
    )
    monkeypatch.setattr(attention_module, "is_fa_min_version", lambda version: True)
    # Core computes the angles on CUDA, wherever the model is.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    frequencies = rotary(1024)

    def stock(mixer, layer_number):
        attention = StockAttention(
            config,
            SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=IdentityOp,
                linear_proj=RowParallelLinear,
            ),
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            pg_collection=model.pg_collection,
        ).eval()
        attention.load_state_dict(mixer.state_dict(), strict=False)

        def forward(hidden_Th, context):
            out, bias = attention(
                hidden_Th[:, None], None, inference_context=context, rotary_pos_emb=frequencies
            )
            return out[:, 0], bias

        return forward

    for number, layer in enumerate(model.decoder.layers, start=1):
        if hasattr(layer, "self_attention"):
            mixer = layer.self_attention
            monkeypatch.setattr(mixer, "forward", stock(mixer, number))
    mode = getattr(inference_utils, "InferenceMode", None)  # 0.18 and later ask it
    if mode is not None:
        monkeypatch.setattr(mode, "_is_active", True)
    given = tiny_engine(model, max_tokens=24).generate(prompts, params)
    for ours, cores in zip(expected, given):
        assert cores.generated_tokens == ours.generated_tokens
        np.testing.assert_allclose(cores.log_probs, ours.log_probs, atol=1e-5)
        assert cores.prefix == ours.prefix


@pytest.mark.parametrize("pattern", ["MG*-W-", "W", "*"])
def test_layout_of_a_mixed_step(pattern):
    """Decodes first, then prefill chunks; positions, block tables and logit rows follow."""
    engine = tiny_engine(tiny_model(pattern), max_tokens=40)
    first = engine.add_request(random_tokens(20), greedy(10))
    engine.step()
    second = engine.add_request(random_tokens(70, seed=1), greedy(2))
    engine.step()
    context = engine.context
    assert context.request_query_lengths == [1, 39]
    assert context.request_kv_length_offsets == [20, 0]
    assert context.active_token_count == 40
    assert context.token_positions().tolist() == [20, *range(39)]
    assert context.input_ids[0].tolist() == [
        first.generated_tokens[0],
        *second.tokens[:39].tolist(),
    ]
    assert not context.is_decode_only() and context.is_dynamic_batching()
    cu_query, longest = context.cu_query_lengths()
    assert (cu_query.tolist(), longest) == ([0, 1, 40], 39)
    cu_kv, kv_lengths, longest = context.cu_kv_lengths()
    assert (cu_kv.tolist(), kv_lengths.tolist(), longest) == ([0, 21, 60], [21, 39], 39)
    assert isinstance(context.ragged_layout(), RaggedLayout)
    for layer_number in range(1, len(pattern) + 1):
        if pattern[layer_number - 1] in "*W":
            keys, values, table = context.key_value_cache(layer_number)
            assert keys.shape == values.shape == (len(engine.memory.pool), 16, 2, 16)
            assert table.shape == (2, 3)
            layout, q = context.ragged_layout(), torch.randn(40, 4, 16)
            o = paged_attention(q, keys, values, table, layout, AttentionPattern(0.25))
            assert o.isfinite().all()


def test_padding_rows_make_every_batch_a_multiple_of_eight():
    engine = tiny_engine(tiny_model("*"), max_tokens=512)
    for length, rows in ((1, 8), (8, 8), (9, 16), (100, 104)):
        engine.add_request(random_tokens(length), greedy(1), RequestOptions(salt=str(length)))
        engine.step()
        assert engine.context.input_ids.shape == (1, rows)
        while engine.has_work:
            engine.step()


PROMPTS = [random_tokens(20 + 7 * seed, seed=seed) for seed in range(8)]


def answer_logits(engine, prompts):
    """The logits [tokens, V] of each prompt's answer, all run side by side."""
    recorder = LogitsRecorder(engine)
    requests = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [torch.stack([row for one, _, row in recorder.rows if one is r]) for r in requests]


@pytest.mark.parametrize("pattern", [*"*WL+MSGKCHZEBP-", "MG*-W-"])
def test_logits_of_eight_are_to_the_bit_those_of_each_alone(pattern):
    model = tiny_model(pattern, num_moe_experts=4, moe_router_topk=4)
    together = answer_logits(tiny_engine(model), PROMPTS)
    for prompt, logits in zip(PROMPTS, together):
        (alone,) = answer_logits(tiny_engine(model), [prompt])
        assert alone.shape == (6, 97)
        assert torch.equal(logits, alone)


def test_logits_of_prompts_that_need_no_forward_are_those_of_the_forward_to_the_bit():
    engine = tiny_engine(tiny_model("MG*-W-"))
    computed = answer_logits(engine, PROMPTS)
    restored = [answer_logits(engine, [prompt])[0] for prompt in PROMPTS]
    assert engine.stats()["skipped_tokens"] == sum(map(len, PROMPTS))
    for once, again in zip(computed, restored):
        assert torch.equal(once[0], again[0])


def test_tables_of_a_slot_are_not_those_of_the_request_before():
    engine = tiny_engine(tiny_model("W*"), max_requests=1, prefix_caching="off")
    model = engine.model
    for seed, length in enumerate((100, 30, 60)):
        prompt = random_tokens(length, seed=seed)
        result = engine.generate([prompt], greedy(4))[0]
        fresh = tiny_engine(model, max_requests=1).generate([prompt], greedy(4))[0]
        assert result.generated_tokens == fresh.generated_tokens
