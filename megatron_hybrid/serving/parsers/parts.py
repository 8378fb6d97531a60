"""What an answer consists of."""

import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reasoning:
    """More of it."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call."""

    index: int
    name: str
    arguments: str
    """JSON, of an object, as the model wrote it if it wrote JSON."""
    id: str = field(default_factory=lambda: new_id(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the call as OpenAI's messages have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def new_id(num_chars: int = 0) -> str:
    """An id for a call. num_chars: of it; 0: as OpenAI's are."""
    name = uuid.uuid4().hex
    return name[:num_chars] if num_chars else f"call_{name[:24]}"


AnswerPart = Reasoning | Content | ToolCall
