"""build_datasets: the datasets of a training run, from their files."""

import os
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch.utils.data import Dataset

from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.config import SPLITS, DataFields, parse_blend, parse_split
from megatron_hybrid.training.data.index_files import check_dataset, count_labels
from megatron_hybrid.training.data.rows import ConversationRows, DocumentRows, PreferenceRows


def build_datasets(
    fields: DataFields, tokenizer: Tokenizer, num_samples: tuple[int | None, int | None, int | None]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Build the training, validation and test data by megatron-core's builder, on all ranks.

    Item i of a dataset is one row of s = `sequence_length` tokens: "tokens" and "labels" int64 [s],
    "loss_mask" fp32 [s], "lengths" list of int, of the sequences in the row, with the sum s.
    Padding is the last sequence of its row, with no loss; "padding" is its length.

    The order of the rows depends on the files, the seed and num_samples: a run that goes on after
    a stop must ask for as many as before.

    Args:
        num_samples: rows of each dataset, which repeats its documents as needed. 0 makes no such
            dataset; None makes one epoch.

    Raises:
        ValueError: a field or a file of a dataset is wrong; on all ranks.
    """
    with fail_together(ValueError, whole_job=True):
        fields.check()
        blends = _checked_blends(fields, tokenizer, num_samples)
    config = GPTDatasetConfig(
        random_seed=fields.seed,
        sequence_length=fields.sequence_length,
        tokenizer=tokenizer,
        path_to_cache=None if fields.cache_path is None else os.fspath(fields.cache_path),
        create_attention_mask=False,
        reset_position_ids=False,  # positions count from the start of each sequence anyway
        reset_attention_mask=fields.reset_at_documents,
        eod_mask_loss=fields.mask_end_of_document_loss,
        **blends,
    )
    if fields.blend:  # core would look for the documents of a part that nobody asks for
        parts = zip(config.split_matrix, num_samples)
        config.split_matrix = [None if size == 0 else part for part, size in parts]
    rows, builder = _ROWS[fields.kind], BlendedMegatronDatasetBuilder
    return tuple(builder(rows, num_samples, lambda: True, config).build())


_ROWS = {"pretraining": DocumentRows, "sft": ConversationRows, "preferences": PreferenceRows}


def _checked_blends(fields: DataFields, tokenizer: Tokenizer, num_samples: tuple) -> dict:
    """Check all datasets of the blends, and return core's fields for the blends."""
    wanted = [name for name, size in zip(SPLITS, num_samples) if size != 0]
    if fields.blend:
        ends = [0.0, *accumulate(parse_split(fields.split))]
        bounds = {name: own for name, own in zip(SPLITS, pairwise(ends)) if name in wanted}
        for name, (start, end) in bounds.items():
            if start == end:
                raise ValueError(f"split is {fields.split!r}, which leaves nothing for {name}.")
        return {"blend": _checked(fields, tokenizer, "blend", bounds), "split": fields.split}
    per_split = [
        _checked(fields, tokenizer, name, {name: (0.0, 1.0)}) if name in wanted else None
        for name in SPLITS
    ]
    return {"blend_per_split": per_split}


def _checked(
    fields: DataFields, tokenizer: Tokenizer, name: str, bounds: dict[str, tuple[float, float]]
) -> tuple[list[str], list[float] | None]:
    """Check a blend, and return it in core's form.

    bounds: split -> where its part of each dataset's documents starts and ends, from 0 to 1.
    """
    prefixes, weights = parse_blend(name, getattr(fields, name))
    if not prefixes:
        raise ValueError(f"there is no {name} data: name datasets in {name}, or ask for no rows.")
    if len(prefixes) > 1 and fields.cache_path is not None and not dist.is_initialized():
        raise ValueError(
            "cache_path for several datasets needs torch.distributed: initialise it first, or "
            "leave cache_path out."
        )
    sizes = []
    for prefix in prefixes:
        lengths = check_dataset(prefix, tokenizer, fields.kind, fields.reset_at_documents)
        sizes.append(float(lengths.sum(dtype=np.int64)))
        used, what = lengths, "tokens"
        if fields.kind != "pretraining":
            most = fields.sequence_length // _ROWS[fields.kind].group
            used = count_labels(prefix, most)
            what = f"an answer to train in their first {most} tokens"
        for split, (start, end) in bounds.items():
            first, last = (round(bound * len(lengths)) for bound in (start, end))
            if not used[first:last].any():
                raise ValueError(
                    f"{prefix} has {len(lengths)} documents, of which split {fields.split!r} gives "
                    f"none with {what} to {split}: use a larger part, or more documents."
                )
        # Without cache_path, GPTDataset puts it here.
        default = os.path.join(prefix, "cache", f"{DocumentRows.__name__}_indices")
        _check_cache(fields.cache_path or default)
    return prefixes, None if len(prefixes) == 1 else weights or sizes


def _check_cache(path: str | os.PathLike) -> None:
    """Raise ValueError for a cache that cannot be used. Core would only raise on the first rank."""
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written: set cache_path to a folder that can.")
    for file in sorted(Path(path).glob("*.npy")):
        try:
            np.load(file, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(
                f"{file} is torn, perhaps by a run that was killed while it wrote the order of "
                f"rows: remove it, it is made anew. ({error})"
            ) from error
