"""What the context lays out: rows, positions, tables; and bits that do not depend on the batch."""

import pytest
import torch
from differential import LogitsRecorder
from reference import finish, greedy, random_tokens, tiny_engine, tiny_model

PROMPTS = [random_tokens(20 + 7 * seed, seed=seed) for seed in range(8)]


def answer_logits(engine, prompts):
    """The logits [tokens, V] of each prompt's answer, all run side by side."""
    recorder = LogitsRecorder(engine)
    requests = [engine.add_request(prompt, greedy(6)) for prompt in prompts]
    finish(engine)
    assert engine.epoch == 0  # serving changes no weights
    return [torch.stack([row for one, _, row in recorder.rows if one is r]) for r in requests]


@pytest.mark.parametrize("pattern", [*"*WL+MSGKCHZEBPQRUV-", "SJ", "MG*-W-"])
def test_logits_of_eight_are_to_the_bit_those_of_one_alone(pattern):
    model = tiny_model(pattern, num_moe_experts=4, moe_router_topk=4)
    together = answer_logits(tiny_engine(model), PROMPTS)
    for prompt, logits in zip(PROMPTS[1::3], together[1::3]):
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
