"""Folders that tell NVIDIA Dynamo's frontend of a model: config.json and the tokenizer, in the form
of Hugging Face."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_hybrid.checkpoints.folder import CONFIG_FILE, CheckpointFolder
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import TOKENIZER_FILE

KEPT_CARDS = 8
"""The ones used last stay; others stay while a worker holds them."""
_READ = {".json", ".jinja", ".model", ".txt"}
"""What the frontend may read of a folder of Hugging Face."""
_WHOLE_BYTES = 1 << 30
"""Files of up to so many bytes count whole; of others a piece in each step, and both ends."""
_PIECE_BYTES, _STEP_BYTES = 4 << 10, 4 << 20
_held: dict[Path, int] = {}
"""Cards of this process, locked until it ends."""


def card_folder(folder: Path, tokenizer: Tokenizer, context: int, dtype: str) -> Path:
    """Make a folder with all that the frontend reads, without weights.

    Its name is that of its content, and a fingerprint of the weights is a part of that: Dynamo
    takes workers for those of one model only if their folders have one path and the same content,
    and refuses others under its name. It stays while this process lives, and beyond that until
    `KEPT_CARDS` others were used.

    Args:
        tokenizer: of the model, with its chat template.
        context: most tokens of prompt and answer.
        dtype: in which the weights are used.
    """
    values = CheckpointFolder(folder).values
    is_foreign = "model_type" in values and (folder / TOKENIZER_FILE).is_file()
    if "model_type" not in values:
        values = {
            "model_type": "megatron_hybrid",
            "architectures": ["HybridModel"],
            "vocab_size": values["vocab_size"],
            "max_position_embeddings": context,
            "eos_token_id": list(tokenizer.end_tokens),
        }
    values = {**values, "megatron_hybrid_weights": f"{_digest(folder, _READ)} {dtype}"}
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(cache) / "megatron_hybrid" / "cards"
    parent.mkdir(parents=True, exist_ok=True)
    with _alone(parent):
        made = Path(tempfile.mkdtemp(dir=parent))
        try:
            if is_foreign:
                for path in folder.iterdir():
                    if path.suffix in _READ:
                        shutil.copyfile(path, made / path.name)
            else:
                tokenizer.save(made)
            (made / CONFIG_FILE).write_text(json.dumps(values), encoding="utf-8")
            found = parent / _digest(made)
            if not found.is_dir():
                made.rename(found)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        os.utime(found)
        _hold(found)
        _drop_old(parent)
    return found


def _digest(folder: Path, left_out: Collection[str] = ()) -> str:
    """Hash the names and contents of a folder's files. left_out: endings of those that count not.
    Weights that were trained further have another hash, and so have those in other files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix in left_out:
            continue
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\0".encode())
        with open(path, "rb") as file:
            if size <= _WHOLE_BYTES:
                hashlib.file_digest(file, lambda: digest)
                continue
            for start in (*range(0, size, _STEP_BYTES), size - _PIECE_BYTES):
                file.seek(start)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One process at a time makes and drops cards."""
    folder = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _hold(card: Path) -> None:
    """Lock a card for as long as this process lives."""
    if card not in _held:
        _held[card] = os.open(card, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(_held[card], fcntl.LOCK_SH)


def _drop_old(parent: Path) -> None:
    """Remove the cards that no process holds, but those used last."""
    ages: dict[Path, float] = {}
    for card in filter(Path.is_dir, parent.iterdir()):
        with suppress(OSError):  # it is gone, where folders cannot be locked
            ages[card] = card.stat().st_mtime
    for card in sorted(ages, key=ages.__getitem__, reverse=True)[KEPT_CARDS:]:
        with suppress(OSError):  # the same, or it is held, or somebody else's
            folder = os.open(card, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(card, ignore_errors=True)
            finally:
                os.close(folder)
