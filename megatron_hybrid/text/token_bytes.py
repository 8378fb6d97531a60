"""TokenBytes: the bytes that each token of a tokenizer adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

# Byte-level tokens are written with printable characters: those of Latin-1 stand for themselves,
# the other bytes for U+0100 and on. A token of byte fallback is named after its byte.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token. Special tokens, which are left out of texts, and ids that are no
    tokens have none.

    Args:
        tokenizer: whose tokens they are.
        vocab_size: highest token id + 1.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    @cached_property
    def later(self) -> list[bytes]:
        """Bytes of each token after others.

        Raises:
            ValueError: the tokenizer has a decoder that is not known here.
        """
        if self._is_word_piece:
            # Its decoder sees one token at a time, and whether it is the first.
            first, twice = self.first, self._decoded_each(2)
            return [text[len(start) :] for start, text in zip(first, twice)]
        steps = self._decoder_steps
        kinds = {step.get("type") for step in steps}
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            names = ", ".join(sorted(map(str, kinds)))
            raise ValueError(
                f"the bytes of this tokenizer's tokens are unknown: its decoder is {names}; those "
                "known are ByteLevel, ByteFallback, Metaspace and WordPiece"
            )
        found = [b""] * self._vocab_size
        for text, token in self._text_tokens:
            found[token] = _decoded(text, steps)
        return found

    @cached_property
    def first(self) -> list[bytes]:
        """Bytes of each token at the start of a text: WordPiece writes it without the space before
        a word, and with the "##" of a word's part.

        Raises:
            ValueError: as `later`.
        """
        return self._decoded_each(1) if self._is_word_piece else self.later

    @property
    def _is_word_piece(self) -> bool:
        return [step.get("type") for step in self._decoder_steps] == ["WordPiece"]

    @property
    def _text_tokens(self) -> list[tuple[str, int]]:
        """Names and ids of all tokens but special ones."""
        added = self._tokenizer.get_added_tokens_decoder()
        items = self._tokenizer.get_vocab().items()
        return [each for each in items if each[1] not in added or not added[each[1]].special]

    def _decoded_each(self, times: int) -> list[bytes]:
        """Return, for each id, the bytes of a text that has its token so many times."""
        tokens = [token for _, token in self._text_tokens]
        texts = self._tokenizer.decode_batch([[token] * times for token in tokens])
        found = [b""] * self._vocab_size
        for token, text in zip(tokens, texts):
            found[token] = text.encode()
        return found

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        return decoder.get("decoders", [decoder])


def _decoded(text: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """Bytes of one token's text, by the steps of a decoder."""
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and all(character in _BYTE_OF for character in text):
            return bytes(_BYTE_OF[character] for character in text)
        if kind == "ByteFallback" and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        if kind == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
        if kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
    return text.encode()
