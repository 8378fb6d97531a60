"""What a profile says, against arithmetic by hand and against the caches asked one by one."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from reference import tiny_model
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.tools.profile import OURS, profile, read_requests, render
from megatron_hybrid.tools.replay.protocol import Request

CONFIG = tiny_model("M*-", vocab_size=256).config
ATTENTION = tiny_model("*-", vocab_size=256).config


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.int32)


def requests(*prompts, output=()):
    answer = np.array(output, dtype=np.int32)
    return [Request(prompt, answer, i, 0, float(i)) for i, prompt in enumerate(prompts)]


def by_name(result):
    return {each.name: each for each in result.caches}


def test_the_same_prompt_again():
    """Twice 100 tokens: this engine skips half of all; others what lies before a block's end."""
    result = profile(requests(tokens(100), tokens(100)), CONFIG, 1e8)
    aligned, grid, blocks, ours, ceiling = result.caches
    whole = 99 // aligned.block_tokens * aligned.block_tokens
    assert aligned.name == f"block-aligned, {aligned.block_tokens} tokens"
    assert aligned.skipped_percent == 100 * whole / 200
    assert (grid.name, grid.skipped_percent, grid.too_short_percent) == ("64-token grid", 32.0, 0.0)
    assert (blocks.name, blocks.skipped_percent) == ("256-token blocks", 0.0)
    assert blocks.too_short_percent == 100.0
    assert ours.skipped_percent == ceiling.skipped_percent == 50.0
    assert (result.requests, result.prompt_tokens, result.lost_tokens) == (2, 200, {})
    assert not result.answers


def test_a_next_turn_resumes_behind_the_answer():
    answer = tokens(30, 1)
    follower = np.concatenate([tokens(100), answer, tokens(10, 2)])
    turns = requests(tokens(100), follower, output=answer)
    result = profile(turns, CONFIG, 1e8)
    assert by_name(result)[OURS].skipped_percent == round(100 * 130 / 240, 2)
    assert result.answers
    assert not profile([*turns, *requests(tokens(9))], CONFIG, 1e8).answers


def test_others_may_part_where_a_message_starts():
    """The first of two chats that part there leaves a state, as it does in the engine."""
    system = tokens(50)
    chats = requests(*(np.concatenate([system, tokens(30, seed)]) for seed in (1, 2)))
    told = [replace(request, message_starts=(50,)) for request in chats]
    assert by_name(profile(told, CONFIG, 1e8))[OURS].skipped_percent == round(100 * 50 / 160, 2)
    assert by_name(profile(chats, CONFIG, 1e8))[OURS].skipped_percent < 31.25


def test_lost_tokens_say_why():
    """A cache of half of the KV: what was known is computed again. Tokens that an infinite cache
    skips and this one does not are all accounted for."""
    prompts = [*[tokens(300, seed) for seed in range(6)] * 2, tokens(300, 5)[:290]]
    memory = 3 * 300 * profile(requests(tokens(9)), CONFIG, 1e8).kv_bytes_per_token
    result = profile(requests(*prompts), CONFIG, memory)
    ours, ceiling = (each.skipped_percent for each in result.caches[-2:])
    lost = list(result.lost_tokens.values())
    assert sum(lost) == pytest.approx((ceiling - ours) / 100 * result.prompt_tokens, abs=1)
    assert len(lost) > 1 and lost == sorted(lost, reverse=True)
    assert "kv_evicted" in result.lost_tokens


def test_an_encoding_makes_room():
    prompts = [tokens(40, seed) for seed in range(12)] * 2
    config = tiny_model("M*-", vocab_size=256, mamba_state_dim=128).config
    one = profile(requests(tokens(9)), config, 1e8)
    memory = 6 * one.checkpoint_bytes + 13 * 48 * one.kv_bytes_per_token
    exact, small = (
        profile(requests(*prompts), config, memory, encoding) for encoding in ("exact", "int8")
    )
    assert small.checkpoint_bytes < exact.checkpoint_bytes / 2
    assert by_name(small)[OURS].skipped_percent > by_name(exact)[OURS].skipped_percent
    assert by_name(small)["64-token grid"] == by_name(exact)["64-token grid"]


@pytest.mark.parametrize(
    ("large", "said"),
    [(1, "1 prompt does not fit into the cache at all:"), (2, "2 prompts do not fit into")],
)
def test_what_is_too_large_for_the_pool_is_told_first_and_compared_by_nobody(large, said):
    """An infinite cache would skip the second of the long ones."""
    small, long = [tokens(200)] * 2, [tokens(5000, 1)] * large
    result = profile(requests(*long, *small), ATTENTION, 100_000)
    alone = profile(requests(*small), ATTENTION, 100_000)
    assert (result.too_large, result.compared_tokens) == (large, 400)
    assert (result.requests, result.prompt_tokens) == (2 + large, 400 + 5000 * large)
    assert (result.caches, result.lost_tokens) == (alone.caches, alone.lost_tokens)
    text = render(result)
    assert text.startswith(said)
    assert "of the other 2 prompts, 400 tokens" in " ".join(text.split())


def test_a_cache_for_none_of_the_prompts_is_refused():
    with pytest.raises(ValueError, match=r"none of the prompts fits into 0\.0001 GB.* 4,000 tok"):
        profile(requests(tokens(5000), tokens(4000)), ATTENTION, 100_000)


@pytest.mark.parametrize("lengths", [(1,), (5, 5), (1, 2, 3, 4, 511, 512, 513, 1000)])
def test_the_histogram_counts_every_prompt_once(lengths):
    bins = profile(requests(*map(tokens, lengths)), ATTENTION, 1e8).histogram
    for each in bins:
        assert each["requests"] == sum(each["start"] <= n < each["end"] for n in lengths)
    assert sum(each["requests"] for each in bins) == len(lengths)
    assert bins[0]["requests"] and bins[-1]["requests"]
    assert all(a["end"] == b["start"] for a, b in pairwise(bins))


def test_the_table():
    result = profile(requests(tokens(100), tokens(100)[:80]), CONFIG, 1e8)
    assert render(profile(requests(tokens(9)), CONFIG, 1e8)).startswith("1 prompt, 9 tokens")
    lines = render(result).splitlines()
    assert lines[0] == "2 prompts, 180 tokens; median 90, 95 % up to 99, longest 100"
    assert any(line.startswith("64 - 127 ") and "< 64-token grid" in line for line in lines)
    assert any(line.split()[-2:] == ["0.0", "44.4"] for line in lines if "infinite" in line)
    assert any(line.startswith("state_never_saved") for line in lines)
    assert max(map(len, lines)) <= 80
    assert "not measurements" in render(result) and "Answers (`output`) are not" in render(result)


def test_json_holds_what_the_table_shows():
    result = profile(requests(tokens(100), tokens(100)), CONFIG, 1e8)
    values = json.loads(json.dumps(result.to_dict()))
    assert [each["name"] for each in values["caches"]] == [each.name for each in result.caches]
    assert values["histogram"] == [{"start": 64, "end": 128, "requests": 2}]
    assert "lengths" not in values


@pytest.mark.parametrize(
    ("memory", "encoding", "message"),
    [
        (100, "exact", "1e-07 GB of cache hold less than 2 pages of .* give at least [0-9.e-]+ GB"),
        (-1e9, "exact", "-1 GB of cache"),
        (1e8, "int4", "state_encoding is 'int4'; use 'exact', 'bf16' or 'int8'"),
    ],
)
def test_bad_settings(memory, encoding, message):
    with pytest.raises(ValueError, match=message):
        profile(requests(tokens(10)), CONFIG, memory, encoding)


@pytest.fixture
def with_bos(tmp_path):
    """A folder with the demo's tokenizer, which begins every prompt with its token 0."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    bos = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for tool in tools or [] %}{{ tool.name }} {% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    settings = {"bos_token": bos, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def read_row(folder, **row):
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps(row))
    (request,) = read_requests(path, folder, 1 << 20)
    return request


def test_a_prompt_begins_with_what_the_tokenizer_puts_there_and_an_answer_goes_on(with_bos):
    request = read_row(with_bos, prompt="once upon a time", output=" there was a king")
    assert request.prompt[0] == 0
    assert 0 not in request.output
    whole = read_row(with_bos, prompt="once upon a time there was a king").prompt
    assert whole.tolist() == [*request.prompt, *request.output]


def test_the_tools_of_a_chat_are_part_of_its_prompt(with_bos):
    messages = [{"role": "user", "content": "once upon a time"}]
    plain = read_row(with_bos, messages=messages)
    with_tools = read_row(with_bos, messages=messages, tools=[{"name": "a long story"}])
    assert len(with_tools.prompt) > len(plain.prompt)
    with pytest.raises(ValueError, match="line 1: `tools` is 7; it must be a list"):
        read_row(with_bos, messages=messages, tools=7)


def test_text_needs_the_models_folder(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1]}\n{"prompt": "text"}\n')
    with pytest.raises(ValueError, match=r"line 2: it has text, and .* give the model's folder"):
        read_requests(path, tmp_path / "config.json", 256)
