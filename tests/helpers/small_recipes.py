"""A small model, and a small text to train it on, for tests of runs."""

from contextlib import closing
from pathlib import Path

import torch
from index_folders import write_documents
from megatron.core import parallel_state

from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reports import LOG, read_log
from megatron_hybrid.training.trainer import Trainer, training_device

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "ffn_hidden_size": 48,
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
    "mamba_num_groups": 1,
}


def small_documents() -> list[list[int]]:
    """60 documents of 5 to 59 tokens of the demo's: few, so that there is something to learn."""
    generator, end = torch.Generator().manual_seed(5), Tokenizer.from_folder(DEMO_FOLDER).eod
    sizes = torch.randint(5, 60, (60,), generator=generator).tolist()
    return [[*torch.randint(300, 320, (n,), generator=generator).tolist(), end] for n in sizes]


def write_small_text(prefix: Path) -> str:
    """Their dataset. Returns its prefix."""
    return write_documents(prefix, small_documents(), Tokenizer.from_folder(DEMO_FOLDER))


def small_recipe(**sections) -> Recipe:
    """A recipe of the demo's tokenizer: the usual fields of these sections, and the given ones."""
    usual = {
        "run": {"steps": 4},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoints": {"asynchronous": False},
        "reports": {"every_steps": 1},
    }
    sections = {**usual, **{name: usual.get(name, {}) | one for name, one in sections.items()}}
    return Recipe.of({"tokenizer": "demo", **sections})


def train_alone(recipe: Recipe, folder: Path, export: bool = False) -> list[dict]:
    """Train on this rank alone, and return the records of the log."""
    parallel_state.destroy_model_parallel()
    with training_device() as device, closing(Trainer(recipe, folder, device)) as trainer:
        trainer.train()
        if export:
            trainer.export(folder / "exported")
    return read_log(folder / LOG)
