"""Tokens that begin a prompt and tokens that end an answer, as the tokenizer states them."""

import pytest
from scripted import EOD, ByteTokenizer, scripted_engine

from megatron_hybrid.inference.sampling_params import SamplingParams

BOS = ByteTokenizer.bos


def answer(monkeypatch, script, **fields):
    engine = scripted_engine(monkeypatch, {1: script})
    params = SamplingParams(num_tokens_to_generate=len(script), seed=1, **fields)
    return engine.generate([[40, 41, 42, 43]], params)[0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [20]),
        ({"termination_id": 22}, [20, 21]),
        ({"stop_token_ids": (20,)}, []),
        ({"ignore_termination": True}, [20, 21, 22, EOD]),
        ({"detokenize_stop_sequence": True}, [20, 21]),
    ],
)
def test_any_end_token_of_the_tokenizer_ends_the_answer(monkeypatch, fields, kept):
    monkeypatch.setattr(ByteTokenizer, "end_tokens", (EOD, 30, 21), raising=False)
    result = answer(monkeypatch, [20, 21, 22, EOD], **fields)
    assert result.token_ids == kept
    assert result.finish_reason == ("stop" if len(kept) < 4 else "length")


def test_a_tokenizer_without_end_tokens(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "end_tokens", (), raising=False)
    assert answer(monkeypatch, [20, EOD]).token_ids == [20, EOD]


@pytest.mark.parametrize("adds_bos_itself", [False, True])
def test_add_bos_adds_one(monkeypatch, adds_bos_itself):
    engine = scripted_engine(monkeypatch, {1: [0]}, prompt_length=2)
    if adds_bos_itself:
        monkeypatch.setattr(ByteTokenizer, "tokenize", lambda self, text: [BOS, 0])
    params = SamplingParams(num_tokens_to_generate=1, seed=1, add_BOS=True)
    assert engine.generate("a", params)[0].prompt_tokens == [BOS, 0]
    assert engine.explain("a", params).match.prompt_tokens == 2


def test_special_tokens_in_the_text_need_a_tokenizer_that_can_write_them(monkeypatch):
    with pytest.raises(ValueError, match="skip_special_tokens=False needs a tokenizer"):
        answer(monkeypatch, [20], skip_special_tokens=False)
