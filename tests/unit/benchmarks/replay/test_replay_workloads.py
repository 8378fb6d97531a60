"""The seeded workloads are the ones that published figures refer to; traces load as documented."""

import hashlib
import json
from itertools import islice

import numpy as np
import pytest

from benchmarks.replay import to_jsonl, traces
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.tools.replay.jsonl import load_jsonl

PUBLISHED = {  # of the requests [0, 60) with limit=60, and [1500, 1560) without a limit
    "short-classify": ("f7a95a0f8a1b7862", "f2ee680c2430f8a9"),
    "chat": ("1294de9b2e39e3a0", "3e829044d8466fe3"),
    "agent": ("3434b309c186c7ee", "f26c35b02d5bf21b"),
    "rl-group": ("57de3191f72b04db", "b1987288eca7945b"),
    "rag-fork": ("1e254c3bfc483ad3", "62ba869f84e850e0"),
    "code": ("acc2355aca654e7c", "352f011451dcad33"),
}


def digest(requests):
    found = hashlib.sha256()
    for request in requests:
        found.update(len(request.prompt).to_bytes(4, "little"))
        found.update(request.prompt.astype("<i4").tobytes())
        found.update(request.output.astype("<i4").tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", PUBLISHED)
def test_requests_are_the_published_ones(name):
    generate = WORKLOADS[name].generate
    assert (digest(generate(60)), digest(islice(generate(), 1500, 1560))) == PUBLISHED[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_is_in_order_and_repeats(name):
    requests = list(WORKLOADS[name].generate(80))
    assert digest(requests) == digest(WORKLOADS[name].generate(80))
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    turns = {}
    for request in requests:
        assert request.prompt.dtype == request.output.dtype == np.int32
        assert len(request.prompt) and len(request.output)
        before = turns.get(request.session)
        assert request.turn == (0 if before is None else before.turn + 1)
        if before is not None:  # the conversation goes on
            n = len(before.prompt)
            assert np.array_equal(request.prompt[:n], before.prompt)
        turns[request.session] = request


def test_some_chats_drop_the_thinking_part():
    """What follows the last prompt is the end of its answer, all of it or the last part."""
    last, kept = {}, []
    for request in WORKLOADS["chat"].generate(600):
        if request.session in last:
            before = last[request.session]
            follows = request.prompt[len(before.prompt) :]
            n = len(before.output)
            whole = np.array_equal(follows[:n], before.output)
            cut = next((c for c in range(n) if follows[0] == before.output[c]), None)
            assert np.array_equal(follows[: n - cut], before.output[cut:])
            kept.append(whole)
        last[request.session] = request
    assert 0.6 < np.mean(kept) < 0.8


def test_fluctuating_prefixes_share_what_they_should():
    bases, shared = {}, {}
    for request in WORKLOADS["fluctuating"].generate(300):
        key = tuple(request.prompt[:8])
        if key not in bases:
            bases[key] = request.prompt
            assert len(request.prompt) == 6000
            continue
        n = min(len(bases[key]), len(request.prompt))
        shared.setdefault(key, []).append(int((bases[key][:n] != request.prompt[:n]).argmax()))
    for lengths in shared.values():
        assert lengths[:2] == [5120, 4992][: len(lengths)]
        assert all(4992 <= length <= 5120 for length in lengths)
    assert len({length for lengths in shared.values() for length in lengths}) > 50


# ---- recorded traces ----


@pytest.fixture
def mooncake(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [5, 6]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 0, "hash_ids": [5, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake_blocks_become_tokens(mooncake):
    first, second = traces.load(mooncake)
    assert digest([first, second]) == "8a67019d3c514985"
    assert (len(first.prompt), len(first.output), first.arrival) == (700, 3, 0.0)
    assert (len(second.prompt), len(second.output), second.arrival) == (1024, 1, 1.5)
    assert np.array_equal(first.prompt[:512], second.prompt[:512])
    assert not (first.prompt[512:] == second.prompt[512:700]).any()
    assert first.session != second.session
    assert len(list(traces.load(mooncake, limit=1))) == 1


def test_tokens_of_a_block_depend_on_its_id_alone():
    both = traces.block_tokens(0).tobytes() + traces.block_tokens(182790).tobytes()
    assert hashlib.sha256(both).hexdigest()[:16] == "0534e0843099481f"


def test_jsonl_with_token_ids(tmp_path):
    rows = [
        {"prompt": [1, 2, 3], "output": [4], "session": "a", "turn": 0, "arrival": 0.5},
        {"prompt": [1, 2, 3, 4, 5], "output": [6, 7], "session": "a", "turn": 1, "arrival": 2},
        {"prompt": [9], "output": [8]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two, three = traces.load(path)
    assert two.prompt.tolist() == [1, 2, 3, 4, 5] and two.output.tolist() == [6, 7]
    assert (one.session, two.session, two.turn, two.arrival) == ("a", "a", 1, 2.0)
    assert (three.session, three.turn, three.arrival) == (2, 0, 2.0)


def test_blank_lines_before_the_first_row(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('\n\n{"prompt": [1, 2, 3]}\n')
    assert [request.prompt.tolist() for request in traces.load(path)] == [[1, 2, 3]]


GOOD = {"timestamp": 7, "input_length": 700, "output_length": 3, "hash_ids": [5, 6]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hash_ids": []}, r"`hash_ids` is \[\]: give a list of at least one whole number from 0"),
        ({"hash_ids": [1, -1]}, r"`hash_ids` is \[1, -1\]: give a list"),
        ({"hash_ids": [1, 2**44]}, f"to {2**44 - 1}"),
        ({"input_length": 1025}, "`input_length` is 1025: 2 `hash_ids` stand for 1 to 1024 tokens"),
        ({"input_length": 0}, "`input_length` is 0"),
        ({"output_length": None}, "`output_length` is None: give a whole number from 0"),
        ({"timestamp": "now"}, "`timestamp` is 'now': give milliseconds from 0 on"),
        ({"timestamp": 5}, "`timestamp` is 5, after 7: .* sort it by `timestamp`"),
    ],
)
def test_a_bad_mooncake_row_is_named(tmp_path, wrong, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | wrong) + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2: .*" + message):
        list(traces.load(path))


def test_a_trace_that_is_no_json(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 1 is no JSON"):
        traces.load(path)


@pytest.mark.parametrize("text", ["", '{"text": "hello"}\n'])
def test_another_format_is_refused(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="must be a JSON object with `hash_ids`"):
        traces.load(path)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_as_json_lines_is_the_same(tmp_path, capsys, name):
    to_jsonl.main([name, "--limit", "12"])
    path = tmp_path / "trace.jsonl"
    path.write_text(capsys.readouterr().out)
    read, made = list(load_jsonl(path)), list(WORKLOADS[name].generate(limit=12))
    assert digest(read) == digest(made)
    assert [(r.session, r.turn) for r in read] == [(r.session, r.turn) for r in made]
    assert [r.arrival for r in read] == pytest.approx([r.arrival for r in made], abs=1e-3)


def test_completions_leave_the_last_one_of_their_file_near_the_cursor():
    """Of two prompts in one file the later one follows the earlier up to 30 tokens before the
    cursor, or to a place far away."""
    files, kept = {}, []
    for request in WORKLOADS["code"].generate(600):
        key = tuple(request.prompt[200:210])  # where a file starts, unless the cursor is there
        if key in files:
            before = files[key]
            n = min(len(before), len(request.prompt))
            differs = before[:n] != request.prompt[:n]
            kept.append(len(before) - (int(differs.argmax()) if differs.any() else n))
        files[key] = request.prompt
    kept = np.array(kept)
    near = (kept >= 600) & (kept <= 630)
    assert len(kept) > 400 and 0.7 < near.mean() < 0.9
