"""Recorded traces load as documented."""

import hashlib
import json

import numpy as np
import pytest
from replayed import digest

from benchmarks.replay import traces


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
