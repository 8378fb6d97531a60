"""ChatTemplate: renders messages as text in a model's training format.

A template is a Jinja program of a checkpoint, so it runs in Jinja's sandbox, with plain JSON values
only. Its filters and functions are those of `transformers`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_hybrid.utils.validation import json_value

Message = Mapping[str, Any]
PART_TYPES = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a content that are texts."""
OF_TEMPLATE = {"add_generation_prompt", "continue_final_message", "messages", "tokenize", "tools"}
"""Variables that `chat_template_kwargs` cannot change."""
INSTRUCTING = ("system", "developer")
"""Roles of messages shared at the start of many conversations."""
MAX_ROLES = 32
"""Most roles whose forms of content a template remembers."""


OTHER = "\ufdd2"
"""A content that no real text begins or ends with."""


def check_messages(messages: Sequence) -> None:
    """Raise TypeError or ValueError for messages that a template might render wrongly."""
    for index, message in enumerate(messages):
        place = f"message {index} of the chat"
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise TypeError(f"{place} is of type {kind}; each is a dict with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(
                f"{place} has the role {role!r}; it must say 'system', 'user', 'assistant', 'tool' "
                "or what else the template knows"
            )
        if not isinstance(content, (str, list, type(None))):
            kind = type(content).__name__
            raise TypeError(f"{place} has content of type {kind}; it must be a str or a list")
        if all(value is None for key, value in message.items() if key != "role"):
            raise ValueError(f"{place} has no content: {dict(message)!r}")


def common_length(first: Sequence, second: Sequence) -> int:
    """Count the leading elements that two sequences share."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class TextTooLongError(ValueError):
    """A text cannot fit its context, however it is tokenized.

    Args:
        message: names the size and the limit.
        num_tokens: fewest tokens that the text may have.
        max_tokens: tokens of the context.
    """

    def __init__(self, message: str, num_tokens: int, max_tokens: int):
        super().__init__(message)
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


class ChatTemplate:
    """One template, which is compiled at its first use.

    Args:
        source: the Jinja text.
        origin: its file or field, for errors.
        generation: renders `{% generation %}` blocks; None takes `Generation`.
    """

    def __init__(
        self,
        source: str,
        origin: str = "the chat template",
        generation: type[Extension] | None = None,
    ):
        self.source, self.origin, self._generation = source, origin, generation
        self.forms_of = lru_cache(MAX_ROLES)(self._forms_of)  # bounded: callers choose the roles

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
        conversation = self.conversation(messages, {"tools": tools, **variables})
        return self.run(conversation, conversation.messages, add_generation_prompt)

    def fork_points(
        self, conversation: Conversation, full: str, add_generation_prompt: bool
    ) -> list[int]:
        """Find likely junctions with other conversations, by a constant number of renderings.

        They are: the end of the system prompt, and the start of the next message's content (some
        templates put the system prompt into the first question); the start of the last message's
        content, which may be edited, or be one of many after the same examples; and the junction
        with the next turn of this conversation: some templates render past answers with another
        header, or without their reasoning.

        full: the text that the template has written of the conversation.

        Returns:
            Ascending character positions, each once; the last one may be the end.
        """
        plain = conversation.messages
        last = len(plain) - 1
        start = self._content_start(full, conversation, last, add_generation_prompt)
        forks = {self._prefix_length(full, conversation, plain[:last]) if start is None else start}
        first = next((i for i, m in enumerate(plain) if m.get("role") not in INSTRUCTING), None)
        if first is not None:
            forks.add(self._prefix_length(full, conversation, plain[:first]))
            if first != last:
                start = self._content_start(full, conversation, first, add_generation_prompt)
                forks.add(start)
        turn = [{"role": role, "content": OTHER} for role in ("assistant", "user")]
        forks.add(self._parting(full, conversation, [*plain, *turn], False))
        return sorted(forks - {None})

    def prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as this template takes them. Rendering does this itself; messages that
        are prepared already do not change.

        Arguments of tool calls, which OpenAI's clients send as JSON in strings, become objects, or
        stay strings if the template takes these. A list of texts becomes one text, unless the
        template takes parts; a text becomes a list if the template takes only that. A developer
        becomes the system if the template knows no developer.

        Raises:
            ValueError, TypeError: a message has no role or content, a part is no text, or the
                arguments of a call are no JSON.
        """
        check_messages(messages)
        found: list[dict[str, Any]] = []
        for index, given in enumerate(messages):
            # Programs send `"content": null` and `"tool_calls": null` for missing fields.
            message = {key: value for key, value in given.items() if value is not None}
            was_developer = message["role"] == "developer" and "developer" not in self.source
            if was_developer:
                message["role"] = "system"
            role, content = message["role"], message.get("content")
            takes_parts, wants_part = self.forms_of(role)
            if isinstance(content, list):
                texts = [_part_text(index, part) for part in content]
                content = "\n".join(texts)
                if takes_parts:
                    content = [{"type": "text", "text": text} for text in texts]
            if isinstance(content, str) and wants_part:
                content = [{"type": "text", "text": content}]
            if content is not None:
                message["content"] = content
            if (calls := message.get("tool_calls")) is not None:
                if not isinstance(calls, list):
                    raise ValueError(f"message {index} of the chat has tool_calls that are no list")
                message["tool_calls"] = [
                    _with_arguments(f"call {n} of message {index}", call, self.takes_argument_texts)
                    for n, call in enumerate(calls)
                ]
            # Three names for the same. Templates read the first, GPT-OSS the second.
            names = ("reasoning_content", "thinking", "reasoning")
            reasoning = next((message[name] for name in names if name in message), None)
            if reasoning is not None:
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
            said = [each.get("content") for each in (*found[-1:], message)]
            are_texts = all(isinstance(each, str) for each in said)
            if was_developer and found and found[-1]["role"] == "system" and are_texts:
                found[-1]["content"] = "\n\n".join(said)  # templates take one, at the start
            else:
                found.append(message)
        return found

    def conversation(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> Conversation:
        """Return the input of `run`: prepared messages, and variables, as plain JSON values."""
        return Conversation(self.prepare(messages), variables)

    def _probe(self, messages: Sequence[Message]) -> str:
        """Render a short chat without preparing it. Return "" if the template refuses it."""
        conversation = Conversation(messages, {"tools": None})
        return self.try_run(conversation, conversation.messages) or ""

    def _forms_of(self, role: str) -> tuple[bool, bool]:
        """Return whether the content of this role may be a list of parts, [{"type": "text", "text":
        ...}], whose texts the template writes; and whether it has to be such a list, as in some
        templates of models that see images."""
        texts = [f"part {letter} of {role}" for letter in "ab"]
        parts = [{"type": "text", "text": text} for text in texts]
        before = [] if role in ("user", *INSTRUCTING) else [{"role": "user", "content": "?"}]
        both, one, text = (
            self._probe([*before, {"role": role, "content": content}])
            for content in (parts, parts[:1], texts[0])
        )
        is_listed = re.search("['\"]text['\"]", both)
        takes_parts = all(text in both for text in texts) and not is_listed
        return takes_parts, texts[0] in one and texts[0] not in text

    @cached_property
    def takes_argument_texts(self) -> bool:
        """Whether arguments of calls have to be JSON in a text, which it writes as it is."""

        def written(arguments: Any) -> str:
            function = {"name": "f", "arguments": arguments}
            call = {"type": "function", "id": "call00000", "function": function}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            return self._probe([{"role": "user", "content": "?"}, said])

        given = {"probe": "value"}
        objects = written(given)
        if "probe" in objects and str(given) not in objects:
            return False
        return json.dumps(given) in written(json.dumps(given))

    def _content_start(
        self, full: str, conversation: Conversation, index: int, add_generation_prompt: bool
    ) -> int | None:
        plain = conversation.messages
        other = [*plain[:index], with_other_content(plain[index]), *plain[index + 1 :]]
        return self._parting(full, conversation, other, add_generation_prompt)

    def _parting(
        self, full: str, conversation: Conversation, other, add_generation_prompt: bool
    ) -> int | None:
        """Count the characters that a rendering shares with that of messages with `OTHER`. Return
        None if the template does not show that, or refuses it."""
        text = self.try_run(conversation, other, add_generation_prompt)
        return common_length(full, text) if text and OTHER in text else None

    def _prefix_length(self, full: str, conversation: Conversation, messages) -> int | None:
        text = self.try_run(conversation, messages)
        return None if text is None or not full.startswith(text) else len(text)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment(self._generation or Generation).from_string(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.origin} is no Jinja template: {error}") from error

    def run(self, conversation: Conversation, messages, add_generation_prompt: bool) -> str:
        """Return the text that the template writes."""
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        compiled = self._compiled
        try:
            return compiled.render({**conversation.variables, **given})
        except Exception as error:  # a template can raise anything
            raise ValueError(f"{self.origin} cannot render these messages: {error}") from error

    def try_run(
        self, conversation: Conversation, messages, add_generation_prompt: bool = False
    ) -> str | None:
        """Return the text that the template writes, or None if it refuses these messages."""
        try:
            return self.run(conversation, messages, add_generation_prompt)
        except ValueError:
            return None


class Conversation:
    """Input of a template, as plain JSON values: no objects with methods."""

    def __init__(self, messages: Sequence[Message], variables: Mapping[str, Any]):
        if len(messages) == 0:
            raise ValueError("a conversation needs one message or more")
        try:
            self.messages = json.loads(json.dumps(list(messages)))
            # Templates read `documents` without a check that it is defined.
            self.variables = json.loads(json.dumps({"documents": None, **variables}))
        except RecursionError as error:
            raise ValueError("messages, tools or variables are nested too deeply") from error
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"messages, tools and variables must be JSON values: {error}"
            ) from error


def _part_text(index: int, part: Any) -> str:
    """Return the text of a part of a message's content."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in PART_TYPES else None
    if not isinstance(text, str):
        raise ValueError(
            f"message {index} of the chat has a part that is no text, {part!r:.80}: give "
            '{"type": "text", "text": ...} alone'
        )
    return text


def _with_arguments(place: str, call: Any, as_text: bool) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, or the JSON of one. `place` names it in
    errors."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"{place} of the chat has no function")
    if not isinstance(function.get("name"), str):
        raise ValueError(f"{place} of the chat has a name that is no text")
    given = function.get("arguments")
    arguments, why = given or {}, ""
    if isinstance(arguments, str):
        try:
            arguments = json_value(arguments)
        except ValueError as error:
            why = f": {error}"
    if not isinstance(arguments, Mapping):
        name = f"{function.get('name')!r:.80}"
        raise ValueError(
            f"the arguments of {place} of the chat, of {name}, cannot be read as a JSON object{why}"
            f". Send those of the answer: {given!r:.80}"
        )
    if as_text:
        arguments = given if isinstance(given, str) and given else json.dumps(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def with_other_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that differs only in its content, which is `OTHER`."""
    parts = isinstance(message.get("content"), list)
    return {**message, "content": [{"type": "text", "text": OTHER}] if parts else OTHER}


class Generation(Extension):
    """An extension for `{% generation %}...{% endgeneration %}`, which marks the model's words for
    training: it renders only the body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(self.around(body)).set_lineno(line)

    def around(self, body: list[nodes.Node]) -> list[nodes.Node]:
        return body


def _environment(generation: type[Extension]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
