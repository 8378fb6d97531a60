"""DocumentEncoder: chunks of documents to token ids. Each worker of preprocess imports this module,
so it needs no torch."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_hybrid.text.answer_spans import Answer, TrainOn
from megatron_hybrid.text.chat_template import OF_TEMPLATE, ChatTemplate, common_length
from megatron_hybrid.text.document_files import BY_KEY, BrokenRecordError, Chunk
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.child_lifetime import end_with_parent
from megatron_hybrid.utils.validation import json_value

Encoded = tuple[list[int], list[Answer]]
"""Tokens of a conversation, and its answers."""

SPAN = np.dtype([("start", np.int32), ("end", np.int32), ("weight", np.float32)])
"""An answer in the form of datasets: tokens [start, end) of its conversation."""

_OF_PAIRS = '; a preference has "chosen", "rejected" and, for texts, "prompt"'


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Return the dtype of token ids in a dataset, as megatron-core chooses it."""
    return np.uint16 if vocab_size < 65500 else np.int32


def chat_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's tools and `chat_template_kwargs`, or raise ValueError for other types.
    Datasets whose columns have one type hold them as JSON."""
    given = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = fields.get(name) or None
        given[name] = json_value(value) if isinstance(value, str) else value
        if not isinstance(given[name], kind | None):
            raise BrokenRecordError(f"has no {kind.__name__} in {name!r}, but {value!r:.80}")
    variables = given.pop("chat_template_kwargs") or {}
    if taken := OF_TEMPLATE & variables.keys():
        raise BrokenRecordError(f"has {min(taken)!r} in 'chat_template_kwargs': leave it out")
    return {**given, **variables}


@dataclass
class EncodedChunk:
    """Documents of a chunk, in order; those without text are left out."""

    bytes_read: int
    """Bytes read of the file, as in `Chunk`."""
    tokens: np.ndarray
    """Tokens of all documents, one after the other."""
    lengths: list[int]
    """Tokens of each document."""
    answers: list[np.ndarray] = field(default_factory=list)
    """Answers in each conversation, `SPAN` [answers]."""
    empty: int = 0
    """Records that were left out since they have no text."""
    broken: list[str] = field(default_factory=list)
    """Records that are no documents: place and reason."""


class DocumentEncoder:
    """Encodes the documents of chunks.

    Args:
        folder: that of the tokenizer.
        key: field of the text or, with chat, of the messages; "chosen" for preferences.
        chat: documents are conversations, with their tools in the field "tools".
        append_eod: end each text with the tokenizer's end token.
        train_on: messages of a conversation that are trained; see `TrainOn`.
        marked: source of a template that marks answers, or None; see `render_with_answers`.
        preferences: with chat, records are preferences, and each makes two conversations.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        key: str,
        chat: bool,
        append_eod: bool,
        train_on: TrainOn = "all",
        marked: str | None = None,
        preferences: bool = False,
    ):
        self.tokenizer = Tokenizer.from_folder(folder)
        self.train_on = train_on
        self.marked = None if marked is None else ChatTemplate(marked, "the template for training")
        self.key, self.chat, self.preferences = key, chat, preferences
        self.end = [self.tokenizer.eod] if append_eod else []
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def encode(self, chunk: Chunk) -> EncodedChunk:
        encoded = EncodedChunk(chunk.bytes_read, np.empty(0, self.dtype), [])
        if self.chat:
            ids = list(self._conversations(chunk, encoded))
        else:
            found = list(chunk.texts(self.key))
            encoded.broken = [str(each) for each in found if isinstance(each, BrokenRecordError)]
            texts = [each for each in found if isinstance(each, str) and each]
            encoded.empty = len(found) - len(texts) - len(encoded.broken)
            ids = self.tokenizer.tokenize_batch(texts)
            # Some tokenizers write the end token themselves.
            ids = [each + self.end if each[-1:] != self.end else each for each in ids]
        encoded.lengths = [len(each) for each in ids]
        if ids:
            encoded.tokens = np.concatenate([np.array(each, self.dtype) for each in ids])
        return encoded

    def _conversations(self, chunk: Chunk, encoded: EncodedChunk) -> Iterator[list[int]]:
        for index in range(len(chunk.records)):
            try:
                remedy = _OF_PAIRS if self.preferences else BY_KEY
                fields = chunk.parse(index, self.key, remedy)
                if fields is None:
                    continue
                if not (messages := fields[self.key]) and messages in (None, "", []):
                    encoded.empty += 1
                    continue
                if not isinstance(messages, list) and not self.preferences:
                    raise BrokenRecordError(f"has no list in {self.key!r}, but {messages!r:.80}")
                given = chat_variables(fields)
                if self.preferences:
                    found = self._pair(fields, given)
                else:
                    found = [self._conversation(messages, given)]
            except BrokenRecordError as error:
                encoded.broken.append(f"{chunk.place(index)} {error}")
            except Exception as error:  # any error of a record names its line
                told = str(error) if isinstance(error, (ValueError, TypeError)) else repr(error)
                encoded.broken.append(f"{chunk.place(index)}: {told}")
            else:
                for ids, answers in found:
                    encoded.answers.append(np.array(answers, SPAN))
                    yield ids

    def _conversation(self, messages: list, given: Mapping[str, Any]) -> Encoded:
        return self.tokenizer.chat_with_answers(
            messages, train_on=self.train_on, marked=self.marked, **given
        )

    def _pair(self, fields: Mapping[str, Any], given: Mapping[str, Any]) -> list[Encoded]:
        """Return the chosen conversation of a preference, and the rejected one. They are texts
        after a prompt, or messages after those in "prompt" or after their common beginning."""
        prompt, *pair = (fields.get(name) for name in ("prompt", "chosen", "rejected"))
        kind = str if isinstance(pair[0], str) else list
        if not all(isinstance(each, kind) and each for each in pair):
            raise BrokenRecordError(
                'has no two texts, or lists of messages, in "chosen" and "rejected", but '
                f"{pair[0]!r:.60} and {pair[1]!r:.60}"
            )
        if kind is str:
            if not isinstance(prompt, str):
                raise BrokenRecordError(f'has no text in "prompt", but {prompt!r:.80}')
            if (end := self.tokenizer.eod) is None:
                raise BrokenRecordError(
                    "has texts, which end with the tokenizer's end token, and it has none: give it "
                    "an eos_token in tokenizer_config.json"
                )
            asked, *whole = (self.tokenizer.encode(prompt + each) for each in ("", *pair))
            whole = [ids if ids[-1:] == [end] else [*ids, end] for ids in whole]
            start = min(common_length(asked, each) for each in whole)
            return [(ids, [(start, len(ids), 1.0)]) for ids in whole]
        if not isinstance(prompt, list):
            prompt = pair[0][: common_length(*pair)]
            pair = [each[len(prompt) :] for each in pair]
        asked = [{**message, "train": False} for message in prompt]
        return [self._conversation([*asked, *each], given) for each in pair]


# Workers -----------------------------------------------------------------------------------------


def encode_all(chunks: Iterator[Chunk], arguments: tuple, workers: int) -> Iterator[EncodedChunk]:
    """Encode chunks in `workers` processes, in order. At most two chunks for each process wait.

    arguments: those of `DocumentEncoder`.

    Raises:
        RuntimeError: a process died.
    """
    # Not forked: the tokenizer's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, arguments)
    waiting: deque[Future] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker of preprocess died, perhaps for want of memory: use fewer of them."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: DocumentEncoder


def _start_worker(*arguments) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker takes one core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    end_with_parent()
    _encoder = DocumentEncoder(*arguments)


def _encode(chunk: Chunk) -> EncodedChunk:
    return _encoder.encode(chunk)
