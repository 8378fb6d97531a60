"""Recorded traces load as documented, and the seeded workloads are the ones that published figures
refer to."""

import hashlib
import json
from itertools import islice

import numpy as np
import pytest
from replayed import digest

from benchmarks.replay import traces
from benchmarks.replay.workloads import WORKLOADS


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


def test_blank_lines_before_the_first_row(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('\n\n{"prompt": [1, 2, 3]}\n')
    assert [request.prompt.tolist() for request in traces.load(path)] == [[1, 2, 3]]


GOOD = {"timestamp": 7, "input_length": 700, "output_length": 3, "hash_ids": [5, 6]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hash_ids": []}, r"`hash_ids` is \[\]: give a list of at least one whole number from 0"),
        ({"hash_ids": [1, 2**44]}, f"to {2**44 - 1}"),
        ({"input_length": 1025}, "`input_length` is 1025: 2 `hash_ids` stand for 1 to 1024 tokens"),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", r"trace\.jsonl, line 1 is no JSON"),
        ("", "must be a JSON object with `hash_ids`"),
        ('{"text": "hello"}\n', "must be a JSON object with `hash_ids`"),
    ],
)
def test_another_format_is_refused(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        traces.load(path)


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
