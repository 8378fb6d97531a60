"""The fields of requests. Unknown ones are ignored; known ones that have no effect here are
refused, unless they ask for nothing."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_hybrid.serving.errors import ApiError

UNSUPPORTED: dict[str, tuple] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "web_search_options": (),
}
"""Known fields without an effect here -> values that ask for nothing, beside null."""


class Fields(BaseModel):
    """A body."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Fields):
    """Of a stream."""

    include_usage: bool = False


class JsonSchema(Fields):
    """In a `response_format`."""

    name: str | None = None
    schema_: dict[str, Any] | bool = Field(True, alias="schema")


FORMATS = ("text", "json_object", "json_schema")


class ResponseFormat(Fields):
    """As in OpenAI's API."""

    type: Literal[FORMATS]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """As in vLLM's API: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


Positive = Annotated[int, Field(ge=1)]
Texts = Annotated[list[str], Field(min_length=1)]


class GenerationFields(Fields):
    """What completions and chats share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Positive = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    cache_breakpoints: list[int] | None = None
    return_token_ids: bool = False
    priority: int = 0
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    def check(self) -> None:
        """Raise ApiError for a field that cannot be served."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                raise ApiError(
                    400,
                    f"{name} is not supported by this server: leave it out",
                    name,
                    "unsupported_parameter",
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream=true", "stream_options")


class CompletionFields(GenerationFields):
    """Body of /v1/completions."""

    prompt: str | list[int] | Texts | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.echo and self.stream:
            raise ApiError(400, "echo is not supported in a stream: leave out one of both", "echo")


class Function(Fields):
    """That an answer may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] = {}


class Tool(Fields):
    """A function."""

    type: Literal["function"]
    function: Function


class ChatFields(GenerationFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Of the template."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return effort | (self.chat_template_kwargs or {})

    @cached_property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Functions for the template."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Functions that the answer may call."""
        return [] if self.tool_choice == "none" else self.shown_tools or []

    @property
    def required_tools(self) -> list[Function]:
        """Functions of which the answer has to call one; none: it is free."""
        functions = [tool.function for tool in self.tools or ()]
        if self.tool_choice == "required":
            return functions
        if not isinstance(self.tool_choice, dict):
            return []
        named = self.tool_choice.get("function", self.tool_choice)  # flat in /v1/responses
        return [function for function in functions if function.name == named.get("name")]

    def check(self) -> None:
        super().check()
        if self.tool_choice not in (None, "none", "auto") and not self.required_tools:
            raise ApiError(
                400,
                f"tool_choice is {self.tool_choice!r}, and tools are "
                f"{[tool.function.name for tool in self.tools or ()]}: name one of them, or say "
                "'auto', 'required' or 'none'",
                "tool_choice",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            raise ApiError(
                400,
                "continue_final_message needs a last message of the assistant's",
                "continue_final_message",
            )


class TokenizeFields(Fields):
    """Body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


class ExplainFields(TokenizeFields):
    """Body of /cache/explain."""

    cache_salt: str | None = None


class AbortFields(Fields):
    """Body of /abort."""

    request_id: str
