"""Every architecture over two ranks: answers, and what they skip, as on one."""

import pytest
from huggingface import build, kept_names
from rank_processes import on_ranks
from reference import greedy, tiny_engine

import megatron_hybrid as mh

EVEN = {
    "bailing_hybrid": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "kimi_linear": {"linear_num_heads": 4},
}
"""What is changed of a tiny model, so that its heads divide over two ranks."""
EXPERTS = ("gpt_oss",)
"""Models whose experts, having biases, stay whole."""
PROMPT = [3 + 7 * i % 90 for i in range(70)]
PROMPTS = [PROMPT, PROMPT, [*PROMPT[:41], *[5] * 7], PROMPT]


def answers(folder, **sizes):
    """Tokens and skipped tokens: of a prompt, again, of a fork, and after all has been evicted."""
    model, _ = mh.load_pretrained(folder, **sizes)
    engine, found = tiny_engine(model, cache_bytes=16 << 20, max_tokens=48), []
    for number, prompt in enumerate(PROMPTS):
        if number == 3:
            engine.cache.evict(10**6)
        result = engine.generate([prompt], greedy(12))[0]
        found.append((result.token_ids, result.prefix.skipped_tokens))
    engine.check_integrity()
    return found


def assert_answers(folder, kind, expected):
    for name, each in expected.items():
        assert answers(folder / name, **{f"{kind}_model_parallel_size": 2}) == each, name


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_each_architecture_answers_over_two_ranks_as_on_one(tmp_path, kind):
    expected = {}
    for name in [name for name in kept_names(()) if (name in EXPERTS) == (kind == "expert")]:
        build(name, **EVEN.get(name, {})).save_pretrained(tmp_path / name)
        expected[name] = answers(tmp_path / name)
        assert [skipped for _, skipped in expected[name]][::3] == [0, 0]
    on_ranks(assert_answers, 2, tmp_path, tmp_path, kind, expected)
