"""Folders that tell NVIDIA Dynamo's frontend of a model: config.json and the tokenizer, in the form
of Hugging Face."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_hybrid.checkpoints.folder import CONFIG_FILE, CheckpointFolder
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import TOKENIZER_FILE

KEPT_CARDS = 8
"""The ones used last stay; others stay while a worker holds them."""
_held: dict[Path, int] = {}
"""Cards of this process, locked until it ends."""


def card_folder(folder: Path, tokenizer: Tokenizer, context: int) -> Path:
    """The model's own folder, if the frontend can read it; else one without weights.

    The name of the latter is that of its content: Dynamo takes workers for those of one model only
    if their folders have one path. It stays while this process lives, and beyond that until
    `KEPT_CARDS` others were used.

    Args:
        tokenizer: of the model, with its chat template.
        context: most tokens of prompt and answer.
    """
    values = CheckpointFolder(folder).values
    if "model_type" in values and (folder / TOKENIZER_FILE).is_file():
        return folder
    if "model_type" not in values:
        values = {
            "model_type": "megatron_hybrid",
            "architectures": ["HybridModel"],
            "vocab_size": values["vocab_size"],
            "max_position_embeddings": context,
            "eos_token_id": list(tokenizer.end_tokens),
        }
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(cache) / "megatron_hybrid" / "cards"
    parent.mkdir(parents=True, exist_ok=True)
    with _alone(parent):
        made = Path(tempfile.mkdtemp(dir=parent))
        try:
            (made / CONFIG_FILE).write_text(json.dumps(values), encoding="utf-8")
            tokenizer.save(made)
            digest = hashlib.blake2b(digest_size=16)
            for path in sorted(path for path in made.rglob("*") if path.is_file()):
                digest.update(f"{path.relative_to(made)}\0".encode() + path.read_bytes())
            found = parent / digest.hexdigest()
            if not found.is_dir():
                made.rename(found)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        os.utime(found)
        _hold(found)
        _drop_old(parent)
    return found


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
