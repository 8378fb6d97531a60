"""A tokenizer with awkward tokens, and an engine that draws the tokens that a test dictates."""

import torch
from reference import VOCAB_SIZE, tiny_engine, tiny_model

from megatron_hybrid.inference.worker import model_runner

EOD = 96
PIECES = {
    0: b"a",
    1: b"b",
    2: b"ab",
    3: b"STOP",
    4: b"ST",
    5: b"OP",
    6: b" ",
    7: b"\xc3",  # the first byte of an e with an acute accent
    8: b"\xa9",  # the second
    9: b"S",
    10: b"\xe2\x82",  # two of the three bytes of a euro sign
    11: b"\xac",
    EOD: b"",
}


class ByteTokenizer:
    """Tokens are strings of bytes: some of several characters, some of a part of one, one empty."""

    eod = EOD
    bos = 95
    vocab_size = VOCAB_SIZE

    @property
    def token_bytes(self) -> list[bytes]:
        return list(map(piece, range(VOCAB_SIZE)))

    def tokenize(self, text: str) -> list[int]:
        ids = []
        data = text.encode()
        while data:
            token = max(
                (t for t in range(EOD) if data.startswith(piece(t))), key=lambda t: len(piece(t))
            )
            ids.append(token)
            data = data[len(piece(token)) :]
        return ids

    def detokenize(self, ids) -> str:
        return b"".join(map(piece, ids)).decode("utf-8", errors="replace")


def piece(token: int) -> bytes:
    return PIECES.get(token, bytes([token + 20]))  # 32 to 115: printable ASCII


def scripted_engine(monkeypatch, scripts: dict[int, list[int]], prompt_length: int = 4, **fields):
    """An engine that draws `scripts[seed]` for requests of this seed, whatever the logits say.

    All prompts must have `prompt_length` tokens.
    """

    def scripted(logits_nV, draws, _num_candidates):
        assert len(logits_nV) == len(draws)
        return torch.tensor([scripts[draw.seed][draw.position - prompt_length] for draw in draws])

    monkeypatch.setattr(model_runner, "sample", scripted)
    return tiny_engine(tiny_model("-"), ByteTokenizer(), **fields)
