"""`megatron-hybrid bench-serve` on a server of the demo model: its counts are the server's."""

import asyncio
import json

import numpy as np
import pytest
from http_server import running_server

from megatron_hybrid import cli

STORY = "Once upon a time there was a king who had three daughters, and "
COUNTS = ("prompt_tokens", "skipped_tokens", "generation_tokens")


@pytest.fixture
def bench(server, tmp_path):
    """rows of a file, options -> exit status, what --json wrote."""

    def run(rows, *options, url=server.url):
        path, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["bench-serve", str(path), "--base-url", url, "--json", str(out)]
        status = cli.main([*command, *options])
        return status, json.loads(out.read_text())

    return run


def counts(server):
    """Of the engine, since it began."""
    stats = asyncio.run(server.service.engine.stats())
    return np.array([stats[name] for name in COUNTS])


def reported(values):
    return [values[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")]


def mixed(salt):
    """A line of each form."""
    return [
        {"prompt": STORY + "the eldest", "max_tokens": 6, "cache_salt": salt},
        {"prompt": list(range(100, 160)), "max_tokens": 5, "cache_salt": salt},
        {
            "messages": [{"role": "user", "content": "Who goes there?"}],
            "max_tokens": 4,
            "cache_salt": salt,
        },
        {"tokens": list(range(200, 260)), "output": [1, 2, 3], "cache_salt": salt},
    ]


def test_tokens_are_those_that_the_server_counts(server, bench):
    before = counts(server)
    status, values = bench(mixed("counts"), "--ignore-eos")
    assert status == 0 and values["ok"] == 4
    assert reported(values) == (counts(server) - before).tolist()
    rows = values["rows"]
    assert [row["completion_tokens"] for row in rows] == [6, 5, 4, 3]
    assert [row["prompt_tokens"] for row in rows][1::2] == [60, 60]
    assert all(row["ttft_ms"] is not None for row in rows)
    assert all(len(row["itl_ms"]) < row["completion_tokens"] for row in rows)


def test_a_second_run_of_the_same_prompts_is_skipped(bench):
    _, first = bench(mixed("twice"))
    assert first["miss_reasons"] == {"no_shared_prefix": 4} and first["skip_rate"] == 0
    status, second = bench(mixed("twice"))
    assert status == 0
    assert second["cached_tokens"] == second["prompt_tokens"] == first["prompt_tokens"]
    assert second["skip_rate"] == 1 and second["miss_reasons"] == {"none": 4}


def trace():
    """Two chats of three turns as a trace has them, of a larger vocabulary."""
    rng = np.random.default_rng(5)
    histories = [rng.integers(0, 120_000, 400).tolist() for _ in range(2)]
    for turn in range(3):
        for session in range(2):
            prompt, end = histories[session], 40 + 60 * turn
            yield {
                "prompt_tokens": prompt[:end],
                "output": prompt[end : end + 4],
                "session": session,
                "turn": turn,
                "arrival": 0.02 * turn,
            }


def test_a_trace_of_another_vocabulary_is_mapped_or_refused(server, bench, capsys):
    size = server.service.tokenizer.vocab_size
    status, values = bench(trace(), "--request-rate", "recorded")
    assert status == 1 and values["failed"] == {"400": 6}
    assert f"outside of the vocabulary [0, {size})" in " ".join(capsys.readouterr().out.split())
    options = ["--vocab-size", str(size), "--ignore-eos", "--request-rate"]
    status, values = bench(trace(), *options, "recorded")
    assert status == 0 and values["output_tokens"] == 6 * 4
    assert values["prompt_tokens"] == 2 * (40 + 100 + 160)
    # A turn began after the one before had ended: it skips all of its prompt.
    assert values["cached_tokens"] == 2 * (40 + 100)
    status, values = bench(trace(), *options, "300")
    assert status == 0 and values["skip_rate"] == 1


def test_refused_requests_and_keys_are_told(bench, capsys):
    fields = {"max_requests": 1, "cache_bytes": 8 << 20}
    with running_server(fields, max_waiting=0, api_keys=("sesame",)) as small:
        rows = [{"prompt": STORY * (i + 1), "max_tokens": 50} for i in range(6)]
        key = ["--api-key", "sesame", "--ignore-eos"]
        status, values = bench(rows, *key, url=small.url)
        assert status == 1 and values["ok"] >= 1
        assert values["failed"] == {"503": 6 - values["ok"]}
        assert "at capacity (1 run or wait)" in values["first_error"]
        rows = [{"prompt": row["prompt"]} for row in rows]
        one = ["--max-concurrency", "1", "--output-len", "2"]
        status, values = bench(rows, *key, *one, url=small.url)
        assert status == 0 and values["output_tokens"] == 12
        capsys.readouterr()
        assert cli.main(["bench-serve", "prompts.jsonl", "--base-url", small.url]) == 2
    assert "answers 401: the API key is missing or wrong" in capsys.readouterr().err
