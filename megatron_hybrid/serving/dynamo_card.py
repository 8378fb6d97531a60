"""Folders that tell NVIDIA Dynamo's frontend of a model: config.json and the tokenizer, in the form
of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from megatron_hybrid.checkpoints.checkpoint import CONFIG_FILE, read_values
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import TOKENIZER_FILE


def card_folder(folder: Path, tokenizer: Tokenizer, context: int) -> Path:
    """The model's own folder, if the frontend can read it; else one without weights.

    The latter stays, and its name is that of its content: Dynamo takes workers for those of one
    model only if their folders have one path.

    Args:
        tokenizer: of the model, with its chat template.
        context: most tokens of prompt and answer.
    """
    values = read_values(folder / CONFIG_FILE)
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
    return found
