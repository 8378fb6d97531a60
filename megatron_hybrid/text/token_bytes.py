"""The bytes that each token of a tokenizer adds to a text."""

import json
import re
from collections.abc import Mapping, Sequence
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


def token_bytes(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token. Special tokens, which are left out of texts, and ids that are
    no tokens have none.

    vocab_size: highest token id + 1.

    Raises:
        ValueError: the tokenizer has a decoder that is not known here.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        names = ", ".join(sorted(map(str, kinds)))
        raise ValueError(
            f"the bytes of this tokenizer's tokens are unknown: its decoder is {names}; those "
            "known are ByteLevel, ByteFallback and Metaspace"
        )
    added = tokenizer.get_added_tokens_decoder()
    found = [b""] * vocab_size
    for text, token in tokenizer.get_vocab().items():
        if token not in added or not added[token].special:
            found[token] = _decoded(text, steps)
    return found


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
