"""Requests from JSONL: every accepted field, and an error for every bad line that says where."""

import json

import pytest

from megatron_hybrid.tools.replay.jsonl import load_jsonl


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def spelled(text, **_):
    return [ord(letter) for letter in text], []


@pytest.mark.parametrize(
    ("row", "prompt", "output"),
    [
        ({"prompt": [1, 2]}, [1, 2], []),
        ({"prompt": "ab"}, [97, 98], []),
        ({"tokens": [3], "output": [4, 5]}, [3], [4, 5]),
        ({"prompt_tokens": [3], "completion": "c", "model": "x"}, [3], [99]),
        ({"prompt": "a", "tokens": None, "output": ""}, [97], []),
    ],
)
def test_fields(tmp_path, row, prompt, output):
    (request,) = load_jsonl(write(tmp_path, row), tokenize=spelled, vocab_size=128)
    assert (request.prompt.tolist(), request.output.tolist()) == (prompt, output)
    assert request.prompt.dtype == request.output.dtype == "int32"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"turn": 2}, "`turn` is 2, after 3 of its session: write the lines in order of arrival"),
        ({"turn": 4, "arrival": 0.25}, "`arrival` is 0.25, after 0.5: write the lines in order"),
        ({"turn": 4.9}, "`turn` is 4.9: give a whole number from 0 on, or leave it out"),
        ({"turn": -1}, "`turn` is -1: give a whole number from 0 on"),
        ({"turn": 3, "arrival": 0.5}, None),  # samples of one prompt
        ({"session": "b", "turn": 0}, None),
        ({}, None),
    ],
)
def test_lines_are_in_order(tmp_path, second, message):
    first = {"prompt": [1], "session": "a", "turn": 3, "arrival": 0.5}
    path = write(tmp_path, first, {"prompt": [2], "session": "a", **second})
    if message is None:
        assert len(list(load_jsonl(path))) == 2
        return
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        list(load_jsonl(path))


@pytest.mark.parametrize("name", ["nothing.jsonl", "."])
def test_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ValueError, match=r"cannot be read \(.+\): name a JSONL file"):
        list(load_jsonl(tmp_path / name))


def test_sessions_turns_and_empty_lines(tmp_path):
    path = write(
        tmp_path,
        {"prompt": [1], "session": "a", "turn": 3, "arrival": 0.5},
        "",
        {"prompt": [2], "session": 7},
        {"prompt": [3]},
        {"prompt": [4], "session": None, "turn": None, "arrival": None, "output": None},
    )
    one, two, three, four = load_jsonl(path)
    assert (one.session, one.turn, one.arrival) == ("a", 3, 0.5)
    assert (two.session, two.turn, two.arrival) == (7, 0, 1.0)
    assert (three.session, three.turn, three.arrival) == (2, 0, 2.0)
    assert (four.session, four.turn, four.arrival) == (3, 0, 3.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": [1', "is no JSON .* write one object a line"),
        ("[1, 2]", "is a list: write an object with a `prompt`"),
        ({"text": "a"}, "there is no prompt: add one of the fields `prompt`, `messages`, `tokens`"),
        ({"prompt": [1], "tokens": [2]}, "both `prompt` and `tokens` are given: keep one"),
        ({"prompt": [1], "output": [2], "completion": [3]}, "both `output` and `completion`"),
        ({"prompt": []}, "`prompt` is empty: give at least one token"),
        ({"prompt": "ab"}, "`prompt` is text, and there is no tokenizer: give token ids"),
        ({"tokens": "ab"}, "`tokens` is text: give token ids, or name the field `prompt`"),
        ({"prompt": [1], "output": "ab"}, "`output` is text, and there is no tokenizer"),
        ({"prompt_tokens": 12}, "`prompt_tokens` is 12: give text, or a flat list"),
        ({"prompt": [[1, 2]]}, r"`prompt` is \[\[1, 2\]\]: give text, or a flat list"),
        ({"prompt": [1, -3]}, "`prompt` has the token id -3, ids go from 0 to 99: tokenize it"),
        ({"prompt": [100]}, "`prompt` has the token id 100, ids go from 0 to 99"),
        ({"prompt": [1], "session": [1]}, r"`session` is \[1\]; it must be text or a number"),
        ({"prompt": [1], "turn": "x"}, "`turn` is 'x'; it must be a number"),
        ('{"prompt": [1], "turn": 1e999}', "`turn` is inf; it must be a number from"),
        ('{"prompt": [1], "arrival": NaN}', "`arrival` is nan; it must be a number from"),
        ({"prompt": [1], "arrival": 10**400}, r"`arrival` is 10+\.\.\.; it must be a number"),
        ("[" * 100_000, "is no JSON .* write one object a line"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path, {"prompt": [1]}, line)
    with pytest.raises(ValueError, match=rf"prompts.jsonl, line 2:? {message}"):
        list(load_jsonl(path, vocab_size=100))


ASSISTANT = [{"role": "assistant", "content": "b"}]
HALF = r"`prompt` has \\ud83d, half of a character: "


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a\ud83d"}, HALF),
        ({"prompt": [{"role": "user", "content": "a\ud83d"}]}, HALF),
        ({"prompt": [1], "output": ASSISTANT}, r"`output` is \[\{.* give text, or a flat list"),
    ],
)
def test_what_no_tokenizer_can_take(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"line 1: {message}"):
        list(load_jsonl(write(tmp_path, row), tokenize=lambda text, **_: ([7], [])))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1]}\n', encoding="utf-8-sig")
    assert [request.prompt.tolist() for request in load_jsonl(path)] == [[1]]


def test_a_chat_says_where_its_messages_start(tmp_path):
    chat = [{"role": "user", "content": "b"}]
    path = write(tmp_path, {"messages": chat}, {"prompt": [1]})
    one, two = load_jsonl(path, tokenize=lambda chat, **_: ([7, 8, 9], [1, 2]))
    assert (one.prompt.tolist(), one.message_starts) == ([7, 8, 9], (1, 2))
    assert two.message_starts == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", "has no requests: write one JSON object a line"),
        (b'{"prompt": [1]}\n\xff\xfe\x00', r"prompts\.jsonl, after line \d: .* save it as UTF-8"),
    ],
)
def test_a_file_of_nothing_or_of_no_text(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(load_jsonl(path))
