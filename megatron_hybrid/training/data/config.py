"""DataFields: which datasets a training run reads, and how rows are made from them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Annotated, Any, Literal

from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.validation import Range, check_field

SPLITS = ("train", "valid", "test")


@dataclass
class DataFields(Fields):
    """Datasets by the prefix of their files, as `megatron-hybrid preprocess --output` writes them.

    Give either `blend` and `split`, or one blend for each split. A blend is a list of prefixes or
    of pairs [weight, prefix]. Rows are drawn in proportion to the weights, or without weights in
    proportion to the datasets' tokens.
    """

    sequence_length: Annotated[int, Range(ge=1, le=2**31 - 1)]
    """Tokens of a row."""

    kind: Literal["pretraining", "sft", "preferences", "prompts"] = "pretraining"
    """With "pretraining" documents are joined, and cut into rows. With "sft" whole conversations
    are packed into rows, with loss only on the answers. "preferences" are pairs of conversations, a
    chosen and a rejected one, for `dpo`. With "prompts" `train` names files of JSONL whose records
    have a `prompt`, a text or messages, for `grpo`."""

    blend: list = field(default_factory=list)
    """The blend that `split` divides into training, validation and test data."""

    split: str = "969,30,1"
    """Parts of each dataset's documents for training, validation and test, in this order."""

    train: list = field(default_factory=list)
    """The blend to train on, in place of `blend`."""

    valid: list = field(default_factory=list)
    """The blend to evaluate on while training."""

    test: list = field(default_factory=list)
    """The blend of test data, for `build_datasets` in a script: `megatron-hybrid train` does not
    read it."""

    seed: int = 1234
    """Seed of the order of documents and rows."""

    reset_at_documents: bool = True
    """The documents of a row do not see each other: attention, states, convolutions and positions
    restart after each end-of-document token. Conversations never see each other."""

    mask_end_of_document_loss: bool = True
    """There is no loss where an end-of-document token would predict the next document's first."""

    sequence_length_warmup: list[list[Annotated[int, Range(ge=1)]]] = field(default_factory=list)
    """Pairs [step, tokens] in ascending order: before this step, sequences of a row with more than
    this many tokens are cut (Li et al. 2022, arXiv:2108.06084). Rows keep their length."""

    cache_path: str | PathLike | None = None
    """Folder for the order of rows, which is computed once. The default is the folder
    `PREFIX/cache` next to the data."""

    workers: Annotated[int, Range(ge=0, le=1023)] = 0
    """Processes of each rank that read data ahead. With 0 the rank reads data when needed."""

    def check(self) -> None:
        super().check()
        blends = {name: getattr(self, name) for name in ("blend", *SPLITS)}
        for name, entries in blends.items():
            parse_blend(name, entries)
        given = [name for name in SPLITS if blends[name]]
        if bool(self.blend) == bool(given):
            raise ValueError(
                f"give either blend (with split), or train, valid and test; got {given or 'none'}"
                f"{' next to blend' if self.blend else ''}."
            )
        if self.kind == "prompts" and (self.blend or parse_blend("train", self.train)[1]):
            raise ValueError("prompts are files in train, without weights, and no blend.")
        parse_split(self.split)
        pairs = self.sequence_length_warmup
        sound = all(len(pair) == 2 for pair in pairs)
        for column in zip(*pairs) if sound else ():
            sound = sound and list(column) == sorted(set(column))
        if pairs and self.kind in ("preferences", "prompts"):
            raise ValueError(f"sequence_length_warmup would cut the answers to {self.kind}.")
        if not sound or any(tokens >= self.sequence_length for _, tokens in pairs):
            raise ValueError(
                f"sequence_length_warmup is {pairs!r}; it must be a list of pairs [step, tokens] "
                f"that rise, with fewer tokens than sequence_length {self.sequence_length}."
            )

    def longest_sequence(self, step: int) -> int:
        """Return the most tokens of a sequence at a step, counted from 0; for `Batch.cut`."""
        for end, tokens in self.sequence_length_warmup:
            if step < end:
                return tokens
        return self.sequence_length


def parse_blend(name: str, entries: Sequence) -> tuple[list[str], list[float] | None]:
    """Return the prefixes of a blend, and their weights if they have any.

    Raises:
        ValueError: an entry is neither a prefix nor a pair, or only some have weights.
    """
    pairs = [_parse_entry(name, entry) for entry in entries]
    prefixes = [prefix for _, prefix in pairs]
    weights = [weight for weight, _ in pairs if weight is not None]
    if weights and len(weights) != len(prefixes):
        raise ValueError(
            f"{name} has weights for {len(weights)} of {len(prefixes)} datasets; give all or none."
        )
    return prefixes, weights or None


def _parse_entry(name: str, entry: Any) -> tuple[float | None, str]:
    weight, prefix = None, entry
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2:
        weight, prefix = entry
        check_field(f"{name}: a weight", weight, Annotated[float, Range(gt=0)])
        weight = float(weight)
    if not isinstance(prefix, (str, PathLike)) or not fspath(prefix):
        raise ValueError(f"{name} has the entry {entry!r}; use a prefix, or [weight, prefix].")
    return weight, fspath(prefix)


def parse_split(split: str) -> list[float]:
    """Parse the parts for training, validation and test, whose sum becomes 1.

    Raises:
        ValueError: the text is not one to three numbers, or all are 0.
    """
    number = r"\s*(?:\d+\.?\d*|\.\d+)\s*"
    if not re.fullmatch(rf"{number}(?:,{number}){{0,2}}", split):
        raise ValueError(f"split is {split!r}; use three numbers, as in '969,30,1'.")
    parts = [*map(float, split.split(",")), 0.0, 0.0][:3]
    if not sum(parts):
        raise ValueError(f"split is {split!r}; one part at least must be above 0.")
    return [part / sum(parts) for part in parts]
