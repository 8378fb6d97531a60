"""A `tokenizers` tokenizer under the method names of megatron-core's tokenizers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import tokenizers

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


class Tokenizer:
    """Text to token ids and back.

    Args:
        tokenizer: what does the work.
        eod: id of the token that ends a document, if there is one.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, eod: int | None = None):
        self._tokenizer = tokenizer
        self.eod = eod

    @classmethod
    def from_folder(cls, folder: str | os.PathLike) -> Tokenizer:
        """Read tokenizer.json, and the end token's name from tokenizer_config.json if there.

        Raises:
            ValueError: a file is missing, unreadable, or names an end token that does not exist.
        """
        path = Path(folder) / TOKENIZER_FILE
        try:
            # from_file reports every trouble as a bare Exception; reading here tells them apart.
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
        config_path = Path(folder) / TOKENIZER_CONFIG_FILE
        if not config_path.exists():
            return cls(tokenizer)
        try:
            name = json.loads(config_path.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{config_path} cannot be read as JSON: {error}") from error
        if isinstance(name, dict):  # Hugging Face also writes a token as an object
            name = name.get("content")
        if name is None:
            return cls(tokenizer)
        eod = tokenizer.token_to_id(name)
        if eod is None:
            raise ValueError(f"{config_path} names the end token {name!r}, which {path} lacks.")
        return cls(tokenizer, eod)

    def save(self, folder: str | os.PathLike) -> None:
        """Write what `from_folder` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / TOKENIZER_FILE))
        name = None if self.eod is None else self._tokenizer.id_to_token(self.eod)
        config = json.dumps({"eos_token": name}, indent=2) + "\n"
        (folder / TOKENIZER_CONFIG_FILE).write_text(config, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._tokenizer.get_vocab_size()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, nothing put in front or behind."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(ids))
