"""Tokenizer: text and conversations to token ids and back, from the files of a checkpoint.

The ids are those of `transformers`: from tokenizer.json, with the roles of special tokens from
tokenizer_config.json. `encode`, `decode` and `eos_token_id` are as in `transformers`; megatron-core
calls them `tokenize`, `detokenize` and `eod`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from megatron_hybrid.text.answer_spans import Answer, TrainOn, render_with_answers, text_after
from megatron_hybrid.text.chat_template import (
    ChatTemplate,
    Message,
    TextTooLongError,
    common_length,
)
from megatron_hybrid.text.tokenizer_files import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    named_tokens,
    read_tokenizer_files,
    write_tokenizer_files,
)
from megatron_hybrid.utils.other_names import names_arguments
from megatron_hybrid.utils.validation import check_text

# Its tokens distinguish tokenizers with the same vocabulary.
_PROBE = " Don't the naïve  漢字\t🙂 cost\r\n\n    $1234567.89 (or more)?"

# Characters or tokens from which on a call is a batch of one, since the library lets other threads
# run only in batches. Small calls stay out of its thread pool, about which forks would warn.
_LONG = 4096

_PIECE = 64 << 10
"""Characters whose tokens are counted at a time."""
_USUAL_LENGTH = 8
"""Usual characters of a token. The tokens of a text that has more for each token of the context are
counted before it is tokenized."""
_ENDS = 256
"""More tokens than a piece may gain by being cut out of its text: those of two words."""

# Byte-level tokens are written with printable characters: those of Latin-1 stand for themselves,
# the other bytes for U+0100 and on. A token of byte fallback is named after its byte.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

END_OF_TEXT = "<|endoftext|>"
"""The end token of tokenizers that are trained here."""


@names_arguments()
class Tokenizer:
    """Text to token ids and back.

    Args:
        tokenizer: the wrapped one.
        eod: id of the token that ends a document; None takes the first of `end_tokens`.
        end_tokens: further ids that end an answer.
        settings: content of tokenizer_config.json; chat templates use its `bos_token`, ...
        chat_templates: by name: "default" is the usual one, "tool_use" the one for tools.
        generation_config: content of generation_config.json.

    Attributes:
        eod, eos_token_id: see above.
        end_tokens: all ids that end an answer, `eod` first.
        bos: id of the token that begins a text, None if there is none.
        pad: id of the token that fills rows, -1 (as in megatron-core) without one of its own.
        generation_config: see above; it has an engine's defaults of sampling, and `save` writes it.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        eod: int | None = None,
        *,
        end_tokens: Iterable[int] = (),
        settings: Mapping[str, Any] | None = None,
        chat_templates: Mapping[str, ChatTemplate] | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self._settings = dict(settings or {})
        self._templates = dict(chat_templates or {})
        self._limit: int | None = None
        self._kept: tuple[int, str] | None = None
        self.generation_config = dict(generation_config or {})
        if eod is not None:
            self._settings["eos_token"] = tokenizer.id_to_token(eod)
        self._named = named_tokens(self._settings)
        self.end_tokens = tuple(dict.fromkeys([*([] if eod is None else [eod]), *end_tokens]))
        self.eod = self.eos_token_id = self.end_tokens[0] if self.end_tokens else None
        bos = self._named.get("bos_token")
        self.bos = None if bos is None else tokenizer.token_to_id(bos)
        pad = self._named.get("pad_token")
        pad = None if pad is None else tokenizer.token_to_id(pad)
        self.pad = -1 if pad in (None, self.bos, *self.end_tokens) else pad

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None
    ) -> Tokenizer:
        """Read the tokenizer of a checkpoint, its chat templates and the tokens that end an answer.

        Without tokenizer.json, `transformers` (if installed) converts other files: sentencepiece,
        tiktoken, vocab and merges.

        config: content of config.json, which may name end tokens; None reads the file.

        Raises:
            ValueError: a file is missing, unreadable, or contradicts another.
        """
        return cls(**read_tokenizer_files(Path(folder), config))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files for `from_folder`, here and in `transformers`; generation_config.json
        unchanged, if there was one.

        Save the model's config first: if its end tokens and those of the other files are not
        `end_tokens`, these are added to generation_config.json.
        """
        content = self._settings, self._templates, self.generation_config
        write_tokenizer_files(Path(folder), self._tokenizer, self.end_tokens, *content)

    def info(self) -> dict[str, Any]:
        """Return tokenizer_config.json with the chat template and the added tokens that are used,
        as vLLM's route /tokenizer_info has them."""
        names = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._settings,
            "chat_template": self.chat_template,
            "added_tokens_decoder": {
                str(id): {name: getattr(token, name) for name in names}
                for id, token in sorted(added.items())
            },
        }

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id + 1."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def base_vocab_size(self) -> int:
        """`vocab_size` without added tokens: a model may lack unused ones of these, such as a text
        model the token for images."""
        return max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the vocabulary, of the end token and of the tokens of a text with all sorts of
        characters: data made with one tokenizer are not for another."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        content = vocabulary, self.eod, self.tokenize(_PROBE, add_special_tokens=False)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Values of a tokenizer in the names of the caches of megatron-core's datasets."""
        return {"class": type(self).__name__, "fingerprint": self.fingerprint}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: add this tokenizer's special tokens around a prompt (often one at
                its start). False is for text that continues other tokens.

        Raises:
            ValueError: the text has half of a character, or more tokens than the tokenizer is
                `limited_to`.
        """
        check_text("the text", text)
        return self._encode(text[self._wanted(text)], add_special_tokens).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, as `encode` does, but faster.

        Raises:
            ValueError: a text has half of a character.
        """
        for index, text in enumerate(texts):
            check_text(f"text {index}", text)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def limited_to(self, max_tokens: int) -> Tokenizer:
        """Return the same tokenizer for texts and chats of a context of so many tokens. The tokens
        of a long text are counted piece by piece, and it is refused as soon as it cannot fit. A
        text that passes is tokenized, and may still be too long."""
        other = copy.copy(self)
        other._limit = max_tokens
        return other

    def cut_to(self, num_tokens: int | None, side: str) -> Tokenizer:
        """Return the same tokenizer for texts and chats of which so many tokens are kept, or all if
        None. No text is too long, and little more is tokenized than what has these tokens.

        side: where a text is cut: "left" keeps its last tokens, "right" its first.
        """
        other = copy.copy(self)
        other._kept = None if num_tokens is None else (num_tokens, side)
        return other

    def _wanted(self, text: str) -> slice:
        """Return what part of a text is to be tokenized: all, or the part that `cut_to` asks for.

        Raises:
            TextTooLongError: the text has more tokens than the tokenizer is `limited_to`.
        """
        if self._kept is not None:
            return self._kept_part(text)
        if self._limit is not None and len(text) > _USUAL_LENGTH * self._limit:
            self._check_length(text, self._limit)
        return slice(None)

    def _kept_part(self, text: str) -> slice:
        """Return the part at a text's kept side that surely has the tokens to keep, or all."""
        num_tokens, side = self._kept
        length = _PIECE + _USUAL_LENGTH * num_tokens
        while length < len(text):
            part = slice(-length, None) if side == "left" else slice(length)
            if len(self._encode(text[part], False).ids) >= num_tokens + _ENDS:
                return part
            length *= 2
        return slice(None)

    def _check_length(self, text: str, most: int) -> None:
        """Raise TextTooLongError as soon as pieces of a text have more tokens than `most`, wherever
        it is cut."""
        # A token that strips takes all spaces next to it, which may be in another piece.
        added = self._tokenizer.get_added_tokens_decoder().values()
        strips = any(token.lstrip or token.rstrip for token in added)
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            found = self._encode(re.sub(r"\s+", " ", piece) if strips else piece, False).ids
            count += max(0, len(found) - _ENDS)
            if count > most:
                raise TextTooLongError(
                    f"the first {start + len(piece)} characters of the text have at least {count} "
                    f"tokens, more than the context of {most} tokens takes: shorten it",
                    count,
                    most,
                )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without special tokens or with them."""
        if len(ids) < _LONG:
            return self._tokenizer.decode(list(ids), skip_special_tokens)
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens)[0]

    tokenize, detokenize = encode, decode  # as megatron-core calls them

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) < _LONG:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes that each token adds to a text; none for special tokens, which `detokenize` leaves
        out, and for ids that are no tokens.

        Raises:
            ValueError: the tokenizer has a decoder that is not known here.
        """
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        steps = decoder.get("decoders", [decoder])
        kinds = {step.get("type") for step in steps}
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            names = ", ".join(sorted(map(str, kinds)))
            raise ValueError(
                f"the bytes of this tokenizer's tokens are unknown: its decoder is {names}; those "
                "known are ByteLevel, ByteFallback and Metaspace"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        found = [b""] * self.vocab_size
        for text, token in self._tokenizer.get_vocab().items():
            if token not in added or not added[token].special:
                found[token] = _decoded(text, steps)
        return found

    def shown_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in a text, or the name of a special token."""
        return self.text_bytes(token) or (self._tokenizer.id_to_token(token) or "").encode()

    def text_bytes(self, token: int) -> bytes:
        """Return a token's `token_bytes`, or its text alone if the decoder is unknown here; b"" for
        an id of the model's padding beyond the vocabulary."""
        try:
            return self.token_bytes[token] if token < self.vocab_size else b""
        except ValueError:
            return self.detokenize([token]).encode()

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the usual chat template, None if there is none."""
        return self.template_source(None)

    def set_chat_template(self, source: str, origin: str = "the chat template") -> None:
        """Replace the usual chat template.

        Args:
            source: a Jinja program.
            origin: names where it comes from, for errors.
        """
        self._templates["default"] = ChatTemplate(source, origin)

    def template_source(self, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Return the Jinja source of the template of chats with these tools, or None."""
        template = self._find_template(tools)
        return None if template is None else template.source

    def show_special_tokens(self, texts: Collection[str]) -> None:
        """Turn the special tokens that are a part of one of some texts, such as the marks of calls,
        into plain text: answers show them, and guides may ask for them."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        shown = {
            token.content
            for index, token in added
            if token.special and token.content and index not in self.end_tokens
            if any(token.content in text for text in texts)
        }
        if not shown:
            return
        state = json.loads(self._tokenizer.to_str())
        for token in state["added_tokens"]:
            token["special"] &= token["content"] not in shown
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
        vars(self).pop("token_bytes", None)  # it has the former special tokens

    def template_of(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Return the template of chats with these tools.

        Raises:
            ValueError: there is no chat template.
        """
        template = self._find_template(tools)
        if template is None:
            raise ValueError(
                f"this tokenizer has no chat template: its folder has neither {CHAT_TEMPLATE_FILE} "
                f"nor a (default) chat_template in {TOKENIZER_CONFIG_FILE}. Send text or tokens."
            )
        return template

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation as a text prompt. See `ChatTemplate.render`.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages.
            TypeError: an argument is not a JSON value.
        """
        return self.template_of(tools).render(
            messages, add_generation_prompt, tools, **{**self._named, **variables}
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation's prompt. The template writes all special tokens.

        Raises:
            ValueError, TypeError: as `render_chat`.
        """
        if "tokenize" in variables:
            raise TypeError("apply_chat_template gives token ids; render_chat gives the text")
        text = self.render_chat(messages, add_generation_prompt, tools, **variables)
        return self.tokenize(text, add_special_tokens=False)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of `apply_chat_template`, and in them the likely junctions with other
        conversations: see `ChatTemplate.fork_points`.

        Returns:
            Token ids; ascending positions > 0, each once.

        Raises:
            ValueError, TypeError: as `render_chat`.
        """
        template, variables = self.template_of(tools), {**self._named, "tools": tools, **variables}
        conversation = template.conversation(messages, variables)
        text = full = template.run(conversation, conversation.messages, add_generation_prompt)
        check_text("the text of the chat", text)
        start, end, _ = self._wanted(text).indices(len(text))
        text = text[start:end]
        encoding = self._encode(text, add_special_tokens=False)
        ids, spans = encoding.ids, encoding.offsets  # each access makes a new list
        if self._kept is None and self._limit is not None and len(ids) > self._limit:
            return ids, []  # it will be refused: looking for junctions costs twice as much again
        added = self._tokenizer.get_added_tokens_decoder()
        anchors = [  # written in the text; a byte's fallback token may be an added one, too
            index
            for index, (token, span) in enumerate(zip(ids, spans))
            if token in added and added[token].content in text[slice(*span)]
        ]
        anchor_ends = [spans[index][1] for index in anchors]
        forks = set()
        for point in template.fork_points(conversation, full, add_generation_prompt):
            if not start < point <= end:
                continue
            fork = point - start
            # Text is split at added tokens first: tokens before one do not depend on the text
            # after it, so only the tokens from the last one on need comparing.
            past = bisect_right(anchor_ends, fork)
            first = anchors[past - 1] if past else 0
            begin = spans[first][0] if past else 0
            # A letter may follow, whose token may include a space before it.
            texts = text[begin:fork], text[begin:fork] + "a"
            alone = [self._encode(each, add_special_tokens=False).ids for each in texts]
            forks.add(first + min(common_length(each, ids[first:]) for each in alone))
        return ids, sorted(forks - {0, len(ids)})

    def chat_with_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        train_on: TrainOn = "all",
        marked: ChatTemplate | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[Answer]]:
        """Return the tokens of a whole conversation, and which of them are the model's answers:
        those to learn. `render_with_answers` also describes train_on and marked.

        A token in which an answer begins or ends belongs to the answer. An answer that the template
        does not mark ends with its end token, even if that token begins the next turn; then the
        last answer of the conversation ends with it, too. No model generates what comes after it.

        Returns:
            Token ids; the answers in them, ascending, adjacent ones of one weight joined.

        Raises:
            ValueError, TypeError: as `render_with_answers`.
        """
        template = self.template_of(tools)
        given = {**self._named, "tools": tools, **variables}
        text, answers, words = render_with_answers(template, messages, given, train_on, marked)
        check_text("the text of the chat", text)
        encoding = self._encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        starts, ends = zip(*offsets)
        spans = []
        for number, (start, end, weight) in enumerate(answers):
            first, last = bisect_right(ends, start), bisect_left(starts, end)
            if words is not None:
                after = max(first, bisect_left(starts, words[number]))  # an answer may name one
                stops = [i for i in range(after, last) if ids[i] in self.end_tokens]
                if not stops and ids[last : last + 1] and ids[last] in self.end_tokens:
                    stops = [last]
                last = stops[-1] + 1 if stops else last
            if spans and first <= spans[-1][1]:
                is_same = weight == spans[-1][2]
                first = spans.pop()[0] if is_same else spans[-1][1]
            if first < last:
                spans.append((first, last, weight))
        is_open = words is not None and spans and spans[-1][1] == len(ids)
        if is_open and ids[-1] not in self.end_tokens and messages[-1]["role"] == "assistant":
            after = self.encode(text_after(template, messages, given), False)
            if after and after[0] in self.end_tokens:
                ids = [*ids, after[0]]
                spans[-1] = (spans[-1][0], len(ids), spans[-1][2])
        return ids, spans

    def _find_template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate | None:
        template = self._templates.get("default")
        return template if tools is None else self._templates.get("tool_use", template)


def _decoded(text: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of one token's text, by the steps of a decoder."""
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and all(character in _BYTE_OF for character in text):
            return bytes(_BYTE_OF[character] for character in text)
        if kind == "ByteFallback" and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        if kind == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
        if kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
    return text.encode()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. Any text has tokens, and token 0, `END_OF_TEXT`, ends a document.

    Args:
        vocab_size: most tokens, the 256 bytes and `END_OF_TEXT` among them; little text makes
            fewer.

    Raises:
        ValueError: vocab_size is less than 257.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be 257 or more: the bytes, and {END_OF_TEXT}."
        )
    made = tokenizers.ByteLevelBPETokenizer()
    options = {"min_frequency": 0, "show_progress": False, "special_tokens": [END_OF_TEXT]}
    made.train_from_iterator(texts, vocab_size, **options)
    return Tokenizer(tokenizers.Tokenizer.from_str(made.to_str()), eod=0)
