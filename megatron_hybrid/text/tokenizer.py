"""Tokenizer: text and conversations to token ids and back, from the files of a checkpoint.

The ids are those of `transformers`: from tokenizer.json, with the roles of special tokens from
tokenizer_config.json. Method names are those of megatron-core's tokenizers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from megatron_hybrid.files import replace_file
from megatron_hybrid.text.chat_template import ChatTemplate, Message, common_length
from megatron_hybrid.validation import check_text

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"  # of older checkpoints
GENERATION_CONFIG_FILE = "generation_config.json"

# Its tokens tell apart tokenizers with the same vocabulary.
_PROBE = " Don't the naïve  漢字\t🙂 cost\r\n\n    $1234567.89 (or more)?"

# Byte-level tokens are written with printable characters: those of Latin-1 stand for themselves,
# the other bytes for U+0100 and on. A token of byte fallback is named after its byte.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

# Characters or tokens from which on a call is made as a batch of one: in batches alone the library
# lets other threads run. Small ones stay out of its thread pool, of which forks would warn.
_LONG = 4096

# Sources of a tokenizer for `transformers` without tokenizer.json.
FOREIGN_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


def find_tokenizer(folder: str | os.PathLike[str]) -> Path | None:
    """The file for `Tokenizer.from_folder` to read first; None: the folder has no tokenizer."""
    paths = (Path(folder) / name for name in (TOKENIZER_FILE, *FOREIGN_FILES))
    return next((path for path in paths if path.is_file()), None)


class Tokenizer:
    """Text to token ids and back.

    Args:
        tokenizer: the wrapped one.
        eod: id of the token that ends a document; None: the first of `end_tokens`.
        end_tokens: further ids that end an answer.
        settings: content of tokenizer_config.json; chat templates use its `bos_token`, ...
        chat_templates: by name: "default" is the usual one, "tool_use" the one for tools.
        generation_config: content of generation_config.json.

    Attributes:
        eod: see above.
        end_tokens: all ids that end an answer, `eod` first.
        bos: id of the token that begins a text; None: there is none.
        pad: id of the token that fills rows; -1, as in megatron-core: there is none of its own.
        generation_config: see above; an engine's defaults of sampling, and written by `save`.
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
        self.generation_config = dict(generation_config or {})
        if eod is not None:
            self._settings["eos_token"] = tokenizer.id_to_token(eod)
        self._named = _named_tokens(self._settings)
        self.end_tokens = tuple(dict.fromkeys([*([] if eod is None else [eod]), *end_tokens]))
        self.eod = self.end_tokens[0] if self.end_tokens else None
        bos = self._named.get("bos_token")
        self.bos = None if bos is None else tokenizer.token_to_id(bos)
        pad = self._named.get("pad_token")
        pad = None if pad is None else tokenizer.token_to_id(pad)
        self.pad = -1 if pad in (None, self.bos, *self.end_tokens) else pad

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a checkpoint, its chat templates and the tokens that end an answer.

        Without tokenizer.json, `transformers` (if installed) converts other files: sentencepiece,
        tiktoken, vocab and merges.

        Raises:
            ValueError: a file is missing, unreadable, or contradicts another.
        """
        folder = Path(folder)
        path = find_tokenizer(folder)
        if path is None:
            raise ValueError(
                f"{folder / TOKENIZER_FILE} does not exist, nor {', '.join(FOREIGN_FILES)} beside "
                "it: the folder has no tokenizer."
            )
        settings = _read_settings(folder)
        templates = _read_templates(folder, settings)
        if path.name == TOKENIZER_FILE:
            tokenizer = _read_tokenizer(path)
        else:
            tokenizer, names = _convert(path)
            settings.update(names)
        # Truncation and padding are for batches of training data.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens"))
        config_path = folder / TOKENIZER_CONFIG_FILE
        try:
            _add_tokens(tokenizer, settings)
            name = _named_tokens(settings).get("eos_token")
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{config_path} does not fit {path}: {error}") from error
        eod = None if name is None else tokenizer.token_to_id(name)
        if name is not None and eod is None:
            raise ValueError(f"{config_path} names the end token {name!r}, which {path} lacks.")
        return cls(
            tokenizer,
            eod,
            end_tokens=_read_end_tokens(folder),
            settings=settings,
            chat_templates=templates,
            generation_config=_read_if_there(folder / GENERATION_CONFIG_FILE),
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files for `from_folder`, here and in `transformers`; generation_config.json
        unchanged, if there was one.

        Save the model's config first: if its end tokens and those of the other files are not
        `end_tokens`, these are added to generation_config.json.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / TOKENIZER_FILE, lambda path: self._tokenizer.save(str(path)))
        # `transformers` takes tokenizer.json as it is for this class.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None}
        _write_json(folder / TOKENIZER_CONFIG_FILE, {**settings, **self._settings})
        for path in (folder / SPECIAL_TOKENS_FILE, *_template_files(folder).values()):
            path.unlink(missing_ok=True)  # of an earlier tokenizer
        for name, template in self._templates.items():
            path = _template_file(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(template.source, encoding="utf-8")
        path = folder / GENERATION_CONFIG_FILE
        if self.generation_config:
            _write_json(path, self.generation_config)
        name = self._named.get("eos_token")
        stated = [] if name is None else [self._tokenizer.token_to_id(name)]
        if tuple(dict.fromkeys([*stated, *_read_end_tokens(folder)])) != self.end_tokens:
            _write_json(path, {**_read_if_there(path), "eos_token_id": list(self.end_tokens)})

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
        """What megatron-core's datasets keep of a tokenizer in the names of their caches."""
        return {"class": type(self).__name__, "fingerprint": self.fingerprint}

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: add this tokenizer's special tokens around a prompt (often one at
                its start). False for text that continues other tokens.

        Raises:
            ValueError: the text has half of a character.
        """
        check_text("the text", text)
        return self._encode(text, add_special_tokens).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, as `tokenize` gives them, faster.

        Raises:
            ValueError: a text has half of a character.
        """
        for index, text in enumerate(texts):
            check_text(f"text {index}", text)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without special tokens or with them."""
        if len(ids) < _LONG:
            return self._tokenizer.decode(list(ids), skip_special_tokens)
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens)[0]

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) < _LONG:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes that each token adds to a text; none for special tokens, which `detokenize` leaves
        out, and for ids that are no tokens. The first token of a text may add others:
        `first_token_bytes`.

        Raises:
            ValueError: the tokenizer has a decoder that is not known here.
        """
        if self._is_word_piece:
            # Its decoder sees one token at a time, and whether it is the first.
            first, twice = self.first_token_bytes, self._decoded_each(2)
            return [text[len(start) :] for start, text in zip(first, twice)]
        steps = self._decoder_steps
        kinds = {step.get("type") for step in steps}
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            names = ", ".join(sorted(map(str, kinds)))
            raise ValueError(
                f"the bytes of this tokenizer's tokens are unknown: its decoder is {names}; those "
                "known are ByteLevel, ByteFallback, Metaspace and WordPiece"
            )
        found = [b""] * self.vocab_size
        for text, token in self._text_tokens:
            found[token] = _decoded(text, steps)
        return found

    @cached_property
    def first_token_bytes(self) -> list[bytes]:
        """As `token_bytes`, of the first token of a text: WordPiece writes it without the space
        before a word, and with the "##" of a word's part.

        Raises:
            ValueError: as `token_bytes`.
        """
        return self._decoded_each(1) if self._is_word_piece else self.token_bytes

    @property
    def _is_word_piece(self) -> bool:
        return [step.get("type") for step in self._decoder_steps] == ["WordPiece"]

    @property
    def _text_tokens(self) -> list[tuple[str, int]]:
        """Names and ids of all tokens but special ones."""
        added = self._tokenizer.get_added_tokens_decoder()
        items = self._tokenizer.get_vocab().items()
        return [each for each in items if each[1] not in added or not added[each[1]].special]

    def _decoded_each(self, times: int) -> list[bytes]:
        """For each id, the bytes of a text that has its token so many times."""
        tokens = [token for _, token in self._text_tokens]
        texts = self._tokenizer.decode_batch([[token] * times for token in tokens])
        found = [b""] * self.vocab_size
        for token, text in zip(tokens, texts):
            found[token] = text.encode()
        return found

    @cached_property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        return decoder.get("decoders", [decoder])

    def shown_bytes(self, token: int) -> bytes:
        """What to show of a token: its bytes in a text, or the name of a special one."""
        return self.text_bytes(token) or (self._tokenizer.id_to_token(token) or "").encode()

    def text_bytes(self, token: int) -> bytes:
        """As `token_bytes`; with a decoder that is not known here, the token's text alone."""
        try:
            return self.token_bytes[token]
        except ValueError:
            return self.detokenize([token]).encode()

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the usual chat template; None: there is none."""
        template = self._templates.get("default")
        return None if template is None else template.source

    def set_chat_template(self, source: str, origin: str = "the chat template") -> None:
        """Replace the usual chat template.

        Args:
            source: Jinja.
            origin: of it, for errors.
        """
        self._templates["default"] = ChatTemplate(source, origin)

    def with_chat_template(self, source: str, origin: str = "the chat template") -> Tokenizer:
        """The same tokenizer, with another chat template for all chats. Arguments as of
        `set_chat_template`."""
        other = copy.copy(self)
        other._templates = {"default": ChatTemplate(source, origin)}
        return other

    def template_source(self, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Jinja source of the template of chats with these tools; None: there is none."""
        template = self._find_template(tools)
        return None if template is None else template.source

    def show_special_tokens(self, texts: Collection[str]) -> None:
        """Make text of the special tokens that are a part of one of some texts, such as the marks
        of calls: answers show them, and guides may ask for them."""
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
        for name in ("token_bytes", "first_token_bytes"):
            vars(self).pop(name, None)

    def takes_parts(self, role: str) -> bool:
        """Whether the chat template writes the texts of a message of this role, if its content is a
        list of parts. Other templates write the list itself, or refuse it."""
        template = self._templates.get("default")
        return template is not None and template.takes_parts(role)

    def takes_argument_texts(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template of chats with these tools wants the arguments of calls as JSON in
        texts."""
        template = self._find_template(tools)
        return template is not None and template.takes_argument_texts

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
        return self._template(tools).render(
            messages, add_generation_prompt, tools, **{**self._named, **variables}
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation's prompt. The template writes all special tokens.

        Raises:
            ValueError, TypeError: as `render_chat`.
        """
        if "tokenize" in variables:
            raise TypeError("apply_chat_template gives token ids; render_chat gives the text")
        text = self.render_chat(messages, add_generation_prompt, tools, **variables)
        return self.tokenize(text, add_special_tokens=False)

    def chat_message_starts(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Starts of messages, and of the answer, in the tokens of `apply_chat_template`.

        For use as `cache_breakpoints`: the tokens before such a position depend only on the text
        before the message. See `ChatTemplate.message_starts`.

        Returns:
            Ascending positions > 0, each once.

        Raises:
            ValueError, TypeError: as `render_chat`.
        """
        given = messages, add_generation_prompt, tools
        return self._encode_with_positions(ChatTemplate.message_starts, given, variables)[1]

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        """Tokens of `apply_chat_template`, and the likely junctions with other conversations in
        them: see `ChatTemplate.fork_points`.

        Returns:
            Token ids; ascending positions > 0, each once.

        Raises:
            ValueError, TypeError: as `render_chat`.
        """
        given = messages, add_generation_prompt, tools
        ids, forks = self._encode_with_positions(ChatTemplate.fork_points, given, variables, "a")
        return ids, [fork for fork in forks if fork < len(ids)]

    def chat_with_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a whole conversation, and which of them are the model's answers: those to
        learn. See `ChatTemplate.render_with_answers`.

        A token that an answer begins or ends inside of belongs to it. Of an answer that the
        template does not mark, what comes behind its end token does not: nobody generates that.

        Returns:
            Token ids; [start, end) of the answers in them, ascending, those side by side as one.

        Raises:
            ValueError, TypeError: as `ChatTemplate.render_with_answers`.
        """
        template = self._template(tools)
        text, answers = template.render_with_answers(
            messages, tools, **{**self._named, **variables}
        )
        check_text("the text of the chat", text)
        encoding = self._encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        starts, ends = zip(*offsets)
        spans = []
        for start, end in answers:
            first, last = bisect_right(ends, start), bisect_left(starts, end)
            if not template.marks_answers:
                stops = [i for i in range(first, last) if ids[i] in self.end_tokens]
                last = stops[-1] + 1 if stops else last
            if spans and first <= spans[-1][1]:
                first = spans.pop()[0]
            if first < last:
                spans.append((first, last))
        return ids, spans

    def _encode_with_positions(
        self,
        find: Callable[..., list[int]],
        given: tuple,
        variables: Mapping[str, Any],
        next_letter: str = "",
    ) -> tuple[list[int], list[int]]:
        """Tokens of a chat, and for each character position from `find` the number of tokens
        independent of the text behind it.

        Args:
            given: messages, add_generation_prompt, tools.
            next_letter: a letter that may follow, in whose token a space before it may be.
        """
        template, named = self._template(given[2]), {**self._named, **variables}
        text = template.render(*given, **named)
        check_text("the text of the chat", text)
        encoding = self._encode(text, add_special_tokens=False)
        ids, spans = encoding.ids, encoding.offsets  # each access makes a new list
        added = self._tokenizer.get_added_tokens_decoder()
        anchors = [  # written in the text; a byte's fallback token may be an added one, too
            index
            for index, (token, span) in enumerate(zip(ids, spans))
            if token in added and added[token].content in text[slice(*span)]
        ]
        anchor_ends = [spans[index][1] for index in anchors]
        positions = set()
        for start in find(template, *given, **named):
            # Text is split at added tokens first: tokens before one do not depend on the text
            # behind it, so only the tokens from the last one on need comparing.
            past = bisect_right(anchor_ends, start)
            first = anchors[past - 1] if past else 0
            begin = spans[first][0] if past else 0
            texts = {text[begin:start], text[begin:start] + next_letter}
            alone = [self.tokenize(each, add_special_tokens=False) for each in texts]
            positions.add(first + min(common_length(each, ids[first:]) for each in alone))
        return ids, sorted(positions - {0})

    def _find_template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate | None:
        template = self._templates.get("default")
        return template if tools is None else self._templates.get("tool_use", template)

    def _template(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        template = self._find_template(tools)
        if template is None:
            raise ValueError(
                f"this tokenizer has no chat template: its folder has neither {CHAT_TEMPLATE_FILE} "
                f"nor a (default) chat_template in {TOKENIZER_CONFIG_FILE}. Send text or tokens."
            )
        return template


# Files -------------------------------------------------------------------------------------------


def _decoded(text: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """Bytes of one token's text, by the steps of a decoder."""
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} cannot be read as JSON: it holds no object")
    return values


def _read_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda path: path.write_text(text, encoding="utf-8"))


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        # from_file raises a bare Exception for every error; reading here distinguishes them.
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error


def _convert(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Make a tokenizer from files of another kind. Returns it and its special tokens by role."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{path.parent / TOKENIZER_FILE} does not exist. To make it from {path.name}: pip "
            "install transformers"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path.parent), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ValueError(f"transformers cannot read {path} as a tokenizer: {error}") from error
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, tokenizers.Tokenizer):
        raise ValueError(
            f"{path.parent / TOKENIZER_FILE} does not exist, and the {type(loaded).__name__} that "
            f"transformers makes from {path.name} cannot be written as one."
        )
    return tokenizer, loaded.special_tokens_map


def _read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, merged with the separate file of older checkpoints."""
    path = folder / TOKENIZER_CONFIG_FILE
    settings = _read_if_there(path)
    older = folder / SPECIAL_TOKENS_FILE
    if "added_tokens_decoder" not in settings and older.exists():
        settings.update(_read_json(older))
    return settings


def _template_file(folder: Path, name: str) -> Path:
    if name == "default":
        return folder / CHAT_TEMPLATE_FILE
    return folder / CHAT_TEMPLATE_FOLDER / f"{name}.jinja"


def _template_files(folder: Path) -> dict[str, Path]:
    """Template files of a folder, by name."""
    paths = {p.stem: p for p in sorted((folder / CHAT_TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / CHAT_TEMPLATE_FILE).exists():
        paths["default"] = folder / CHAT_TEMPLATE_FILE
    return paths


def _read_templates(folder: Path, settings: dict[str, Any]) -> dict[str, ChatTemplate]:
    """Read the templates, and take those in `settings` out; template files take precedence."""
    stated = settings.pop("chat_template", None)
    templates = {}
    for name, path in _template_files(folder).items():
        try:
            templates[name] = ChatTemplate(path.read_text(encoding="utf-8"), str(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    if templates or stated is None:
        return templates
    origin = f"chat_template of {folder / TOKENIZER_CONFIG_FILE}"
    if isinstance(stated, str):
        stated = [{"name": "default", "template": stated}]
    try:
        sources = {entry["name"]: entry["template"] for entry in stated}
        # Names become file names when the tokenizer is saved.
        sound = all(re.fullmatch(r"\w[\w.-]*", name) for name in sources)
        sound = sound and all(isinstance(source, str) for source in sources.values())
    except (TypeError, KeyError):
        sound = False
    if not sound:
        raise ValueError(f"{origin} must be a string or a list of {{name, template}}")
    return {name: ChatTemplate(source, origin) for name, source in sources.items()}


def _read_end_tokens(folder: Path) -> list[int]:
    """Ids that end an answer, from generation_config.json, else config.json."""
    for name in (GENERATION_CONFIG_FILE, "config.json"):
        path = folder / name
        values = _read_if_there(path)
        ids = values.get("eos_token_id")
        if ids is None and isinstance(values.get("text_config"), dict):
            ids = values["text_config"].get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError(f"eos_token_id in {path} must be an int or a list of them, got {ids}")
        return [i for i in ids if i >= 0]  # -1 stands for none
    return []


# Special tokens ----------------------------------------------------------------------------------


def _content(token: Any) -> str | None:
    """Text of a token, which Hugging Face's files hold as a string or an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of special tokens by role: `bos_token`, a model's own such as `image_token`, ..."""
    roles = {key: value for key, value in settings.items() if key.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        roles.update(extra)
    texts = {role: _content(token) for role, token in roles.items()}
    for role in ("bos_token", "eos_token"):
        if roles.get(role) is not None and texts[role] is None:
            raise ValueError(f"{role} is {roles[role]!r}, which is no token")
    return {role: text for role, text in texts.items() if text is not None}


def _add_tokens(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add the added and special tokens of the settings, as `transformers` does."""
    added = tokenizer.get_added_tokens_decoder().values()
    present = {token.content: token.__getstate__() for token in added}
    stated = {}
    for number, state in (settings.get("added_tokens_decoder") or {}).items():
        stated[int(number)] = tokenizers.AddedToken(**state)
    for number, token in sorted(stated.items()):
        if present.get(token.content) != token.__getstate__():
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ValueError(
                f"it gives {token.content!r} the id {number}, which is "
                f"{tokenizer.token_to_id(token.content)} there"
            )
        present[token.content] = token.__getstate__()
    named = list(_named_tokens(settings).values())
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(settings.get(key), list):
            named += filter(None, map(_content, settings[key]))
    # Tokens outside the vocabulary have no embedding; their text stays plain text.
    known = {name for name in named if tokenizer.token_to_id(name) is not None}
    tokenizer.add_special_tokens(sorted(known - set(present)))
