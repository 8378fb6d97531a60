"""Folders that describe a model to NVIDIA Dynamo's frontend: config.json and the tokenizer, in the
form of Hugging Face."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from megatron_hybrid.checkpoints.folder import CONFIG_FILE, CheckpointFolder
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import TOKENIZER_FILE

_READ = {".json", ".jinja", ".model", ".txt"}
"""Endings of the files that the frontend may read of a folder of Hugging Face."""
_WHOLE_BYTES = 1 << 30
"""Files of up to so many bytes are hashed whole; of others a piece in each step, and both ends."""
_PIECE_BYTES, _STEP_BYTES = 4 << 10, 4 << 20


def card_folder(folder: Path, tokenizer: Tokenizer, context: int, dtype: str) -> Path:
    """Make a folder with all that the frontend reads, without weights.

    Its name is a hash of its content, which includes a fingerprint of the weights: Dynamo takes
    workers for those of one model only if their folders have the same path and content, and refuses
    others under its name. The folder stays for later processes.

    Args:
        tokenizer: that of the model, with its chat template.
        context: most tokens of prompt and answer.
        dtype: the one in which the weights are used.
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
        with suppress(OSError):  # it is there already
            made.rename(found)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return found


def _digest(folder: Path, left_out: Collection[str] = ()) -> str:
    """Hash the names and contents of a folder's files, except those with endings in `left_out`.
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
