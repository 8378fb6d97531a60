"""ChatTemplate: renders messages as text in a model's training format.

A template is a Jinja program of a checkpoint, so it runs in Jinja's sandbox, with plain JSON values
only. Its filters and functions are those of `transformers`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
INSTRUCTING = ("system", "developer")
"""Roles of messages shared at the start of many conversations."""
MAX_ROLES = 32
"""Most roles of which a template remembers something."""


_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around the model's words, in a rendering that marks them: no characters of any text."""
_OTHER = "\ufdd2"
"""A content that no text begins with."""


def common_length(first: Sequence, second: Sequence) -> int:
    """Number of leading elements that two sequences share."""
    pairs = enumerate(zip(first, second))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class TextTooLongError(ValueError):
    """A text cannot fit its context, however it is tokenized.

    Args:
        message: names the size and the limit.
        num_tokens: fewest that the text may have.
        max_tokens: of the context.
    """

    def __init__(self, message: str, num_tokens: int, max_tokens: int):
        super().__init__(message)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class ChatTemplate:
    """One template; compiled at its first use.

    Args:
        source: the Jinja text.
        origin: its file or field, for errors.
    """

    def __init__(self, source: str, origin: str = "the chat template"):
        self.source = source
        self.origin = origin
        self._takes_parts: dict[str, bool] = {}  # by role

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Args:
            messages: each with a "role", and the other fields of the template ("content", ...).
            add_generation_prompt: end with the header of the model's answer.
            tools: JSON schemas of the functions that the model may call.
            variables: further ones of the template (`enable_thinking`, `documents`, ...) and the
                special tokens (`bos_token`, ...).

        Raises:
            ValueError: no messages, or the template is broken, fails or refuses them.
            TypeError: an argument is not a JSON value.
        """
        conversation = _Conversation(messages, {"tools": tools, **variables})
        return self._run(conversation, conversation.messages, add_generation_prompt)

    def fork_points(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Find likely junctions with other conversations, by a constant number of renderings.

        They are: the end of the system prompt, and the start of the next message's content (some
        templates put the system prompt into the first question); the start of the last message's
        content, which may be edited, or be one of many after the same examples; and the junction
        with the next turn of this conversation: some templates render past answers with another
        header, or without their reasoning.

        Args, raises: as `render`.

        Returns:
            Ascending character positions, each once; the last one may be the end.
        """
        conversation = _Conversation(messages, {"tools": tools, **variables})
        plain = conversation.messages
        full = self._run(conversation, plain, add_generation_prompt)
        last = len(plain) - 1
        start = self._content_start(full, conversation, last, add_generation_prompt)
        forks = {self._prefix_length(full, conversation, plain[:last]) if start is None else start}
        first = next((i for i, m in enumerate(plain) if m.get("role") not in INSTRUCTING), None)
        if first is not None:
            forks.add(self._prefix_length(full, conversation, plain[:first]))
            if first != last:
                start = self._content_start(full, conversation, first, add_generation_prompt)
                forks.add(start)
        turn = [{"role": role, "content": _OTHER} for role in ("assistant", "user")]
        forks.add(self._parting(full, conversation, [*plain, *turn], False))
        return sorted(forks - {None})

    def takes_parts(self, role: str) -> bool:
        """Return whether it writes the texts of a message of this role, if its content is a list of
        parts: [{"type": "text", "text": ...}]. Others write the list itself, or refuse it."""
        if role not in self._takes_parts:
            if len(self._takes_parts) >= MAX_ROLES:  # names are the callers'
                self._takes_parts.clear()
            texts = [f"part {letter} of {role}" for letter in "ab"]
            parts = [{"type": "text", "text": text} for text in texts]
            before = [] if role in ("user", *INSTRUCTING) else [{"role": "user", "content": "?"}]
            try:
                written = self.render([*before, {"role": role, "content": parts}], False)
            except ValueError:
                written = ""
            found = all(text in written for text in texts)
            self._takes_parts[role] = found and not re.search("['\"]text['\"]", written)
        return self._takes_parts[role]

    @cached_property
    def takes_argument_texts(self) -> bool:
        """Whether the arguments of calls have to be JSON in a text: it writes them as they are."""

        def written(arguments: Any) -> str:
            function = {"name": "f", "arguments": arguments}
            call = {"type": "function", "id": "call00000", "function": function}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                return self.render([{"role": "user", "content": "?"}, said], False)
            except ValueError:
                return ""

        given = {"probe": "value"}
        objects = written(given)
        if "probe" in objects and str(given) not in objects:
            return False
        return json.dumps(given) in written(json.dumps(given))

    @property
    def marks_answers(self) -> bool:
        """Whether the template has `{% generation %}` around the model's words."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def render_with_answers(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping] | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a whole conversation, and find the model's answers in it.

        They are the template's `{% generation %}` blocks. A template without any is rendered up to
        each answer and after it: the answer is the difference, with what ends its turn.

        Args:
            messages, tools, variables: as in `render`.

        Returns:
            The text, and [start, end) of each answer in it, ascending.

        Raises:
            ValueError: as `render`; or the conversation has no answer, or not one whose place can
                be told.
            TypeError: as `render`.
        """
        conversation = _Conversation(messages, {"tools": tools, **variables})
        full = self._run(conversation, conversation.messages, False)
        if self.marks_answers:
            spans = self._marked_spans(full, conversation)
        else:
            roles = enumerate(message.get("role") for message in conversation.messages)
            indices = [index for index, role in roles if role == "assistant"]
            spans = [self._answer_span(full, conversation, index) for index in indices]
        spans = [(start, end) for start, end in spans if start < end]
        if not spans:
            raise ValueError("the conversation has no answer: no message of the assistant's")
        return full, spans

    def _marked_spans(self, full: str, conversation: _Conversation) -> list[tuple[int, int]]:
        try:
            template = _environment(_MarkedGeneration).from_string(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.origin} is no Jinja template: {error}") from error
        marked = self._run(conversation, conversation.messages, False, template)
        parts = re.split(f"[{_OPEN}{_CLOSE}]", marked)
        if "".join(parts) != full or len(parts) % 2 == 0:
            raise ValueError(
                f"{self.origin} changes the text of its {{% generation %}} blocks afterwards, so "
                "the answers cannot be found: write the blocks out where they are."
            )
        ends = list(accumulate(map(len, parts)))
        return list(zip(ends[:-1:2], ends[1::2]))

    def _answer_span(self, full: str, conversation: _Conversation, index: int) -> tuple[int, int]:
        plain = conversation.messages
        start = self._prefix_length(full, conversation, plain[:index], True)
        end = self._prefix_length(full, conversation, plain[: index + 1])
        if end is None and start is not None:
            end = self._answer_end(full, conversation, index)
        if start is None or end is None:
            raise ValueError(
                f"{self.origin} renders messages[{index}] in another way when the conversation "
                "goes on, so its answer cannot be found: mark answers by {% generation %} in the "
                "template."
            )
        return start, end

    def _answer_end(self, full: str, conversation: _Conversation, index: int) -> int | None:
        """Return where an answer ends that is rendered in another way as the last message, say with
        its reasoning: after its content and what ends its turn."""
        plain = conversation.messages
        texts = []
        for messages in (plain, plain[: index + 1]):
            other = [*messages[:index], _with_content(plain[index], _OTHER), *messages[index + 1 :]]
            whole = self._run(conversation, messages, False)
            after = self._parting(whole, conversation, other, False, reverse=True)
            if after is None:
                return None
            texts.append(whole[len(whole) - after :])
        behind, turn_end = texts
        return len(full) - len(behind) + len(turn_end) if behind.startswith(turn_end) else None

    def _content_start(
        self, full: str, conversation: _Conversation, index: int, add_generation_prompt: bool
    ) -> int | None:
        plain = conversation.messages
        other = [*plain[:index], _with_content(plain[index], _OTHER), *plain[index + 1 :]]
        return self._parting(full, conversation, other, add_generation_prompt)

    def _parting(
        self,
        full: str,
        conversation: _Conversation,
        other,
        add_generation_prompt: bool,
        reverse: bool = False,
    ) -> int | None:
        """Characters that a rendering shares with the one of messages that have `_OTHER`, at its
        start or (reverse) its end; None: it is not shown, or refused."""
        try:
            text = self._run(conversation, other, add_generation_prompt)
        except ValueError:
            return None
        step = -1 if reverse else 1
        return common_length(full[::step], text[::step]) if _OTHER in text else None

    def _prefix_length(
        self, full: str, conversation: _Conversation, messages, add_generation_prompt: bool = False
    ) -> int | None:
        try:
            text = self._run(conversation, messages, add_generation_prompt)
        except ValueError:
            return None
        return len(text) if full.startswith(text) else None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.origin} is no Jinja template: {error}") from error

    def _run(
        self,
        conversation: _Conversation,
        messages,
        add_generation_prompt: bool,
        compiled: jinja2.Template | None = None,
    ) -> str:
        """Return what the template writes. compiled: what to run in place of the source."""
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        compiled = compiled or self._compiled
        try:
            return compiled.render({**conversation.variables, **given})
        except Exception as error:  # a template can raise anything
            raise ValueError(f"{self.origin} cannot render these messages: {error}") from error


class _Conversation:
    """Input of a template, as plain JSON values: no objects with methods."""

    def __init__(self, messages: Sequence[Message], variables: Mapping[str, Any]):
        if len(messages) == 0:
            raise ValueError("a conversation needs one message or more")
        if isinstance(messages, Mapping) or not all(isinstance(m, Mapping) for m in messages):
            raise TypeError(f"messages must be a sequence of mappings, got {messages!r:.80}")
        try:
            self.messages = json.loads(json.dumps([_tidy(message) for message in messages]))
            # Templates read `documents` without a check that it is defined.
            self.variables = json.loads(json.dumps({"documents": None, **variables}))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"messages, tools and variables must be JSON values: {error}"
            ) from error


def _tidy(message: Message) -> dict[str, Any]:
    """A message as templates expect it."""
    # Programs send `"content": null` and `"tool_calls": null` for missing fields.
    tidy = {key: value for key, value in message.items() if value is not None}
    # Three names for the same. Templates read the first, GPT-OSS the second.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((tidy[name] for name in names if name in tidy), None)
    if reasoning is not None:
        tidy = {"thinking": reasoning, **tidy, "reasoning_content": reasoning}
    return tidy


def _with_content(message: dict[str, Any], text: str) -> dict[str, Any]:
    parts = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": text}] if parts else text}


class _Generation(Extension):
    """Renders only the body of `{% generation %}...{% endgeneration %}`, which marks the model's
    words for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(self.around(body)).set_lineno(line)

    def around(self, body: list[nodes.Node]) -> list[nodes.Node]:
        return body


class _MarkedGeneration(_Generation):
    """Renders marks around the body."""

    def around(self, body: list[nodes.Node]) -> list[nodes.Node]:
        before, after = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_OPEN, _CLOSE))
        return [before, *body, after]


def _environment(generation: type[Extension] = _Generation) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[generation, "jinja2.ext.loopcontrols"],
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
