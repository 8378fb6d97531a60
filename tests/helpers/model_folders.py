"""Folders of models, changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def rewrite(folder: Path, change: Callable = dict, target: Path | None = None, **config: Any):
    """Write the tensors of a folder as `change` returns them, and other values into config.json.

    target: where to write both; None: the same folder.
    """
    target = target or folder
    target.mkdir(exist_ok=True)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target
