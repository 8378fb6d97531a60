"""The seeded workloads are the ones that published figures refer to."""

from itertools import islice

import numpy as np
import pytest
from replayed import digest

from benchmarks.replay import to_jsonl
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


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_as_json_lines_is_the_same(tmp_path, capsys, name):
    to_jsonl.main([name, "--limit", "12"])
    path = tmp_path / "trace.jsonl"
    path.write_text(capsys.readouterr().out)
    read, made = list(load_jsonl(path)), list(WORKLOADS[name].generate(limit=12))
    assert digest(read) == digest(made)
    assert [(r.session, r.turn) for r in read] == [(r.session, r.turn) for r in made]
    assert [r.arrival for r in read] == pytest.approx([r.arrival for r in made], abs=1e-3)
