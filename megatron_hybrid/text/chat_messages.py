"""Messages of chats, and their parts: the same for a server, an engine and training data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def part_text(index: int, part: Any) -> str:
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


def with_arguments(place: str, call: Any, as_text: bool) -> dict[str, Any]:
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
