"""preprocess: turns files of documents into a dataset of token ids for training."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_hybrid.checkpoints.pretrained import model_folder
from megatron_hybrid.text.answer_spans import TrainOn, trained_roles
from megatron_hybrid.text.document_encoder import SPAN, EncodedChunk, encode_all, token_dtype
from megatron_hybrid.text.document_files import STDIN, check_files, read_chunks, read_texts
from megatron_hybrid.text.tokenizer import Tokenizer, train_tokenizer
from megatron_hybrid.text.tokenizer_files import find_tokenizer
from megatron_hybrid.training.data.index_files import SPANS, Description
from megatron_hybrid.utils.files import no_new_folders
from megatron_hybrid.utils.progress import progress
from megatron_hybrid.utils.validation import Range, check_field


@dataclass(frozen=True)
class Preprocessed:
    """Counts of what `preprocess` made."""

    documents: int
    tokens: int
    answer_tokens: int
    """Tokens of answers in conversations, which have a loss."""
    empty: int
    """Records that were left out since their text or their list of messages is empty or null."""
    broken: int
    """Records that were left out since they are not documents."""
    seconds: float


def preprocess(
    inputs: Sequence[str | os.PathLike],
    tokenizer: str | os.PathLike,
    output: str | os.PathLike,
    *,
    key: str | None = None,
    workers: int = 1,
    chat: bool = False,
    preferences: bool = False,
    append_eod: bool | None = None,
    one_per_line: bool = False,
    skip_broken: bool = False,
    train_on: TrainOn = "all",
    training_template: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Preprocessed:
    """Write the dataset `output`.bin, .idx and .json (and .spans.bin and .idx with chat).

    Documents keep their order, whatever the number of workers. The files appear when all is done;
    the .idx, without which there is no dataset, is the last of them.

    Args:
        inputs: files of JSONL, text, parquet or arrow, by their endings; "-" for JSONL of the
            standard input; folders of `Dataset.save_to_disk` (Hugging Face's `datasets`).
        tokenizer: folder of the model that is to be trained, or "demo".
        output: prefix of the files to write; there must be no such dataset.
        key: field of the text, by default "text", or with chat of the messages, by default
            "messages". Preferences take None.
        workers: processes that encode; this one reads and writes.
        chat: documents are conversations, for supervised fine-tuning.
        preferences: records have a "chosen" and a "rejected" answer to a "prompt"; each makes two
            conversations, one after the other.
        append_eod: end each document with the tokenizer's end token. None ends all but
            conversations, whose ends the chat template writes.
        one_per_line: each line of a text file is a document; otherwise the whole file is one.
        skip_broken: leave out records that are not documents, and report each.
        train_on: the messages of a chat that are trained: see `TrainOn`.
        training_template: text of a chat template that marks answers by `{% generation %}`, and
            writes the same text as the tokenizer's. `render_with_answers` says how None works.
        tell: gets a line for each of these records.

    Raises:
        ValueError: a file cannot be read, a record is no document, or there are no documents.
        ImportError: parquet, .arrow and .zst files need pyarrow, which is missing.
        RuntimeError: a worker died.
    """
    paths, folder = check_files(inputs, with_stdin=True), model_folder(tokenizer)
    if preferences and (chat or key is not None):
        raise ValueError("preferences have fields of their own: leave out --chat and --key.")
    chat, key = chat or preferences, "chosen" if preferences else key
    trained_roles(train_on)
    if append_eod is None:
        append_eod = not chat
    loaded = Tokenizer.from_folder(folder)
    index = Path(f"{os.fspath(output)}.idx")
    if index.exists():
        raise ValueError(f"{index} exists: remove it, or name another output.")
    check_field("workers", workers, Annotated[int, Range(ge=1)])
    if chat and append_eod:
        raise ValueError("with --chat the template writes the end tokens: leave out --append-eod.")
    if append_eod and loaded.eod is None:
        raise ValueError(
            f"the tokenizer of {folder} has no end token: give it an eos_token in "
            "tokenizer_config.json, or use --no-append-eod."
        )
    if chat and not preferences and loaded.chat_template is None:
        raise ValueError(f"the tokenizer of {folder} has no chat template, which --chat needs.")
    field = key or ("messages" if chat else "text")
    arguments = folder, field, chat, append_eod, train_on, training_template, preferences
    chunks = (chunk for path in paths for chunk in read_chunks(path, one_per_line))
    began = time.perf_counter()
    total = None if STDIN in paths else sum(path.stat().st_size for path in paths)
    empty = broken = 0
    kind = "preferences" if preferences else "sft" if chat else "pretraining"
    with no_new_folders(Path(output).parent), _Output(Path(output), loaded, kind) as files:
        # Closed, so that no worker outlives an error.
        with (
            progress("preprocess", total) as advance,
            closing(encode_all(chunks, arguments, workers)) as all_encoded,
        ):
            for encoded in all_encoded:
                advance(encoded.bytes_read)
                empty += encoded.empty
                broken += len(encoded.broken)
                for line in encoded.broken:
                    if not skip_broken:
                        raise ValueError(f"{line}. Repair it, or leave such out by --skip-broken.")
                    tell(f"left out: {line}")
                files.add(encoded)
        files.finish()
    counts = files.documents, files.tokens, files.answer_tokens
    return Preprocessed(*counts, empty, broken, time.perf_counter() - began)


def train_and_save_tokenizer(
    inputs: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    vocab_size: int,
    *,
    key: str | None = None,
    one_per_line: bool = False,
) -> Tokenizer:
    """Train a tokenizer on the documents of files (see `preprocess`), and write it to a folder
    without one.

    Raises:
        ValueError: the folder has a tokenizer; or see `preprocess` and `train_tokenizer`.
    """
    if (found := find_tokenizer(model_folder(folder))) is not None:
        raise ValueError(f"{found} exists: name another folder, or leave out --train-tokenizer.")
    texts = read_texts(check_files(inputs), key or "text", one_per_line)
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save(folder)
    return tokenizer


class _Output:
    """Files of a dataset, which are in a folder next to it until they are whole."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, kind: str):
        self.prefix, self.tokenizer, self.kind = prefix, tokenizer, kind
        self.folder = prefix.with_name(f"{prefix.name}.partial")
        self.documents = self.tokens = self.answer_tokens = 0

    def __enter__(self) -> _Output:
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
        self.folder.mkdir(parents=True)
        self.text = self._builder("", token_dtype(self.tokenizer.vocab_size))
        self.answers = self._builder(SPANS, np.int32) if self.kind != "pretraining" else None
        return self

    def __exit__(self, *error) -> None:
        shutil.rmtree(self.folder)

    def _builder(self, suffix: str, dtype: type[np.integer]) -> IndexedDatasetBuilder:
        return IndexedDatasetBuilder(str(self.folder / f"{suffix}.bin"), dtype)

    def add(self, encoded: EncodedChunk) -> None:
        ends = np.cumsum(encoded.lengths)[:-1]
        for tokens in np.split(encoded.tokens, ends) if encoded.lengths else ():
            self.text.add_document(tokens, [len(tokens)])
        for spans in encoded.answers:
            self.answers.add_document(spans.view(np.int32), [len(spans) * len(SPAN)])
            self.answer_tokens += int((spans["end"] - spans["start"]).sum())
        self.documents += len(encoded.lengths)
        self.tokens += len(encoded.tokens)

    def finish(self) -> None:
        """Move the files to their places, the index of the tokens last."""
        if not self.documents:
            raise ValueError("the input has no documents: nothing is written.")
        self.text.finalize(str(self.folder / ".idx"))
        suffixes = [".bin", ".json", ".idx"]
        if self.answers is not None:
            self.answers.finalize(str(self.folder / f"{SPANS}.idx"))
            suffixes = [f"{SPANS}.bin", f"{SPANS}.idx", *suffixes]
        tokenizer = self.tokenizer
        Description(
            self.kind,
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            tokenizer.eod,
            self.documents,
            self.tokens,
        ).write(self.folder / ".json")
        for suffix in suffixes:
            os.replace(self.folder / suffix, f"{self.prefix}{suffix}")
