"""Chat templates: messages become the text that a model was trained on.

A template is a Jinja program that comes with a checkpoint, so it runs in Jinja's sandbox and sees
plain JSON values alone. What it may use is what `transformers` offers to it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
INSTRUCTING = ("system", "developer")
"""Roles of messages that many conversations begin with."""


def common_length(first: Sequence, second: Sequence) -> int:
    """How many leading elements two sequences share."""
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class ChatTemplate:
    """One template; compiled when it is first used.

    Args:
        source: the Jinja text.
        origin: where it comes from, for errors.
    """

    def __init__(self, source: str, origin: str = "the chat template"):
        self.source = source
        self.origin = origin

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: each with a "role", and what else the template reads ("content", ...).
            add_generation_prompt: end with what opens the model's answer.
            tools: JSON schemas of the functions that the model may call.
            variables: further ones of the template (`enable_thinking`, `documents`, ...) and the
                special tokens (`bos_token`, ...).

        Raises:
            ValueError: no messages, or the template is broken, fails or refuses them.
            TypeError: something is no JSON value.
        """
        conversation = _Conversation(messages, {"tools": tools, **variables})
        return self._run(conversation, conversation.messages, add_generation_prompt)

    def message_starts(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Where each message starts in the rendered text, and behind them the model's answer.

        That is where the text of the messages before it ends, if it is a prefix of the whole text.
        Some templates refuse a conversation that stops there, or write its last message otherwise
        (with its reasoning, say) than inside of a longer one. Then it is where the content of the
        message begins: the text up to there does not depend on it.

        Args, raises: as `render`.

        Returns:
            Ascending character positions, each once.
        """
        conversation = _Conversation(messages, {"tools": tools, **variables})
        plain = conversation.messages
        full = self._run(conversation, plain, add_generation_prompt)
        starts = {
            self._start(full, conversation, index, add_generation_prompt)
            for index in range(len(plain))
        }
        if add_generation_prompt:
            starts.add(self._prefix_length(full, conversation, plain))
        return sorted(starts - {None})

    def fork_points(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Where other conversations are likely to leave this one. A few renderings, however long it
        is.

        Behind the system prompt, before the next message and before its content (some templates
        write the system prompt into the first question); where the last message starts, which may
        be edited or be one of many behind the same examples; and where the next turn of this very
        conversation leaves it, if that is before its end: some templates write an answer of the
        past otherwise than they ask for one.

        Args, raises: as `render`.

        Returns:
            Ascending character positions, each once.
        """
        conversation = _Conversation(messages, {"tools": tools, **variables})
        plain = conversation.messages
        full = self._run(conversation, plain, add_generation_prompt)
        forks = {self._start(full, conversation, len(plain) - 1, add_generation_prompt)}
        first = next((i for i, m in enumerate(plain) if m.get("role") not in INSTRUCTING), None)
        if first is not None:
            forks.add(self._prefix_length(full, conversation, plain[:first]))
            forks.add(self._content_start(full, conversation, first, add_generation_prompt))
        turns = [
            [*plain, *({"role": role, "content": letter} for role in ("assistant", "user"))]
            for letter in "ab"
        ]
        forks.add(self._common_length(full, conversation, turns, False))
        return sorted(forks - {None, len(full)})

    def _start(
        self, full: str, conversation: _Conversation, index: int, add_generation_prompt: bool
    ) -> int | None:
        start = self._prefix_length(full, conversation, conversation.messages[:index])
        if start is None:
            start = self._content_start(full, conversation, index, add_generation_prompt)
        return start

    def _content_start(
        self, full: str, conversation: _Conversation, index: int, add_generation_prompt: bool
    ) -> int | None:
        plain = conversation.messages
        others = [
            [*plain[:index], _with_content(plain[index], letter), *plain[index + 1 :]]
            for letter in "ab"
        ]
        return self._common_length(full, conversation, others, add_generation_prompt)

    def _prefix_length(self, full: str, conversation: _Conversation, messages) -> int | None:
        try:
            text = self._run(conversation, messages, False)
        except ValueError:
            return None
        return len(text) if full.startswith(text) else None

    def _common_length(
        self, full: str, conversation: _Conversation, others, add_generation_prompt: bool
    ) -> int | None:
        try:
            texts = [self._run(conversation, other, add_generation_prompt) for other in others]
        except ValueError:
            return None
        # A content that makes no difference is not shown.
        if len(set(texts)) == 1:
            return None
        return min(common_length(full, text) for text in texts)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.origin} is no Jinja template: {error}") from error

    def _run(self, conversation: _Conversation, messages, add_generation_prompt: bool) -> str:
        compiled = self._compiled
        try:
            return compiled.render(
                **conversation.variables,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template can raise anything
            raise ValueError(f"{self.origin} cannot render these messages: {error}") from error


class _Conversation:
    """What a template sees, as plain JSON values: no object with methods of its own."""

    def __init__(self, messages: Sequence[Message], variables: Mapping[str, Any]):
        if len(messages) == 0:
            raise ValueError("a conversation needs one message or more")
        if isinstance(messages, Mapping) or not all(isinstance(m, Mapping) for m in messages):
            raise TypeError(f"messages must be a sequence of mappings, got {messages!r:.80}")
        try:
            self.messages = json.loads(json.dumps([_tidy(message) for message in messages]))
            # Templates ask for `documents` without asking first whether they are defined.
            self.variables = json.loads(json.dumps({"documents": None, **variables}))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"messages, tools and variables must be JSON values: {error}"
            ) from error


def _tidy(message: Message) -> dict[str, Any]:
    """A message as templates expect it."""
    # Programs send `"content": null` and `"tool_calls": null` for what is not there.
    tidy = {key: value for key, value in message.items() if value is not None}
    # One thing, three names. Templates read the first, GPT-OSS the second.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((tidy[name] for name in names if name in tidy), None)
    if reasoning is not None:
        tidy = {"thinking": reasoning, **tidy, "reasoning_content": reasoning}
    return tidy


def _with_content(message: dict[str, Any], text: str) -> dict[str, Any]:
    parts = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": text}] if parts else text}


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's words for training. Here it is
    its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
