"""What the context lays out: rows, positions, tables; and bits that do not depend on the batch."""

import pytest
import torch
from differential import LogitsRecorder
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.ops import AttentionPattern, paged_attention


@pytest.mark.parametrize("pattern", ["MG*-W-", "W", "*"])
def test_layout_of_a_mixed_step(pattern):
    """Decodes first, then prefill chunks; positions, block tables and logit rows follow."""
    engine = tiny_engine(tiny_model(pattern), max_tokens=40)
    first = engine.add_request(random_tokens(20), greedy(10))
    engine.step()
    second = engine.add_request(random_tokens(70, seed=1), greedy(2))
    engine.step()
    context = engine.context
    layout = context.ragged_layout()
    assert (layout.lengths, layout.start_positions, layout.num_tokens) == ((1, 39), (20, 0), 40)
    assert context.token_positions().tolist() == [20, *range(39)]
    assert context.input_ids[0].tolist() == [
        first.token_ids[0],
        *second.tokens[:39].tolist(),
    ]
    for layer_number in range(1, len(pattern) + 1):
        if pattern[layer_number - 1] in "*W":
            keys, values, table = context.key_value_cache(layer_number)
            assert keys.shape == values.shape == (len(engine.memory.pool), 16, 2, 16)
            assert table.shape == (2, 3)
            q = torch.randn(40, 4, 16)
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
