"""RequestTemplate: a chat template that came with a request. It is a program of anyone's, so it
runs in a process with limits."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.text.chat_template import ChatTemplate, TextLimit, TextTooLongError
from megatron_hybrid.utils.limited_process import LimitedProcess, TooMuchWorkError, answer_all

_process = LimitedProcess(__name__)


class RequestTemplate(ChatTemplate):
    """Render as `ChatTemplate` does; nothing of the template runs in this process."""

    def run_with(self, variables: dict[str, Any], compiled: None = None) -> str:
        """See the base class."""
        limit = None if self.limit is None else [*self.limit]
        try:
            answer = _process.ask([self.source, self.origin, limit, variables])
        except TooMuchWorkError as error:
            raise ValueError(f"{self.origin} cannot render these messages: {error}") from error
        if "too_long" in answer:
            raise TextTooLongError(*answer["too_long"])
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]


def _answer(question: list[Any]) -> dict[str, Any]:
    source, origin, limit, variables = question
    limit = None if limit is None else TextLimit(*limit)
    try:
        return {"text": ChatTemplate(source, origin, limit).run_with(variables)}
    except TextTooLongError as error:
        return {"too_long": [str(error), error.num_tokens, error.max_tokens]}
    except ValueError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    answer_all(_answer)
