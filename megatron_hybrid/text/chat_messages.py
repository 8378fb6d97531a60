"""Messages as chat templates take them: the same for a server, an engine and training data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_hybrid.utils.validation import json_value

Message = Mapping[str, Any]
PART_TYPES = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a content that are texts."""
OF_TEMPLATE = {"add_generation_prompt", "continue_final_message", "messages", "tokenize", "tools"}
"""What `chat_template_kwargs` cannot change."""


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


class Forms(Protocol):
    """The forms of messages that a `ChatTemplate` takes."""

    source: str
    takes_argument_texts: bool

    def forms_of(self, role: str) -> tuple[bool, bool]: ...


def prepare_messages(messages: Sequence[Message], template: Forms) -> list[dict[str, Any]]:
    """Return messages as a template expects them.

    Tool calls have objects as arguments, which OpenAI's clients send as JSON in strings, or else
    such strings; a list of texts is one text, unless the template takes parts, and a text is such a
    list where it takes nothing else; a developer is the system where it knows no developer.

    Raises:
        ValueError, TypeError: a message has no role or content, a part is no text, or the arguments
            of a call are no JSON.
    """
    check_messages(messages)
    found: list[dict[str, Any]] = []
    for index, given in enumerate(messages):
        # Programs send `"content": null` and `"tool_calls": null` for missing fields.
        message = {key: value for key, value in given.items() if value is not None}
        was_developer = message["role"] == "developer" and "developer" not in template.source
        if was_developer:
            message["role"] = "system"
        role, content = message["role"], message.get("content")
        takes_parts, wants_part = template.forms_of(role)
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
                _with_arguments(f"call {n} of message {index}", call, template.takes_argument_texts)
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
    """Return a tool call whose arguments are an object, or the JSON of one. place: of it, for
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
