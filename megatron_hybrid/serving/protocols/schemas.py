"""Types of the answers of routes: /openapi.json is made from them, and tests check answers."""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, NonNegativeInt, create_model, with_config
from typing_extensions import TypedDict  # before Python 3.12, pydantic reads no other one

from megatron_hybrid.cache.report import MissReason

Json = dict[str, Any]


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


Error = create_model("Error", error=(ErrorFields, ...))


class MessageErrorFields(TypedDict):
    type: str
    message: str
    param: NotRequired[str]


class MessageError(TypedDict):
    type: Literal["error"]
    error: MessageErrorFields


@with_config(ConfigDict(use_attribute_docstrings=True))
class Prefix(TypedDict):
    shared_tokens: NonNegativeInt
    """Prompt tokens whose KV was reused."""
    skipped_tokens: NonNegativeInt
    """Prompt tokens that were not computed."""
    fetched_tokens: NonNegativeInt
    """Skipped tokens that were read from host memory or the disk."""
    miss_reason: MissReason | None
    """Why no more tokens were skipped."""


PromptDetails = create_model("PromptDetails", cached_tokens=(NonNegativeInt, ...))
CompletionDetails = create_model("CompletionDetails", reasoning_tokens=(NonNegativeInt, ...))


class Usage(TypedDict):
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    total_tokens: NonNegativeInt
    prompt_tokens_details: PromptDetails
    prefix: Prefix | list[Prefix]
    completion_tokens_details: NotRequired[CompletionDetails]


class Choice(TypedDict):
    index: NonNegativeInt
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: Json | None
    token_ids: NotRequired[list[NonNegativeInt]]
    weight_epochs: NotRequired[list[tuple[NonNegativeInt, NonNegativeInt]]]


class CompletionChoice(Choice):
    text: str
    prompt_token_ids: NotRequired[list[NonNegativeInt]]
    prompt_logprobs: NotRequired[list[Json | None]]


class Generated(TypedDict):
    id: str
    created: NonNegativeInt
    model: str
    usage: Usage


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


CalledFunction = create_model("CalledFunction", name=(str, ...), arguments=(str, ...))


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[Call]]
    refusal: NotRequired[str | None]


class ChatChoice(Choice):
    message: ChatMessage


class Chat(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[NonNegativeInt]]
    prompt_logprobs: NotRequired[list[Json | None]]


class Responded(TypedDict):
    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: Json | None
    instructions: str | None
    max_output_tokens: NonNegativeInt | None
    metadata: Json
    model: str
    output: list[Json]
    parallel_tool_calls: bool
    previous_response_id: None
    store: bool
    temperature: float | None
    tool_choice: str | Json
    tools: list[Json]
    top_p: float | None
    usage: Json | None


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str
    stop_sequence: str | None
    usage: Json


class Tokenized(TypedDict):
    count: NonNegativeInt
    max_model_len: NonNegativeInt
    tokens: list[NonNegativeInt]
    token_strs: list[str] | None


class Explanation(TypedDict):
    prompt_tokens: NonNegativeInt
    shared_tokens: NonNegativeInt
    skipped_tokens: NonNegativeInt
    known_tokens: NonNegativeInt
    reason: MissReason | None
    edge: int
    text: str
    changes: list[str]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: NonNegativeInt
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NonNegativeInt
    description: str
    has_chat_template: bool
    sampling_defaults: Json


Models = create_model("Models", object=(Literal["list"], ...), data=(list[Model], ...))


History = dict[str, list[float | None]]


class Done(TypedDict):
    message: str


class UpdateDone(Done):
    weight_epoch: NonNegativeInt


class WeightInfo(TypedDict):
    weight_version: str | None
    weight_epoch: NonNegativeInt
    unfinished: str | None


# Answers with one field.
InputTokens = create_model("InputTokens", input_tokens=(NonNegativeInt, ...))
Aborted = create_model("Aborted", aborted=(bool, ...))
Detokenized = create_model("Detokenized", prompt=(str, ...))
TokenIds = create_model("TokenIds", token_ids=(list[NonNegativeInt], ...))
Version = create_model("Version", version=(str, ...))
Load = create_model("Load", server_load=(NonNegativeInt, ...))
Reset = create_model("Reset", reset=(Literal[True], ...))
Saved = create_model("Saved", saved=(Literal[True], ...))
Requests = create_model("Requests", requests=(list[Json], ...))
State = create_model("State", status=(Literal["paused", "resumed", "sleeping", "awake"], ...))
IsPaused = create_model("IsPaused", is_paused=(bool, ...))
IsSleeping = create_model("IsSleeping", is_sleeping=(bool, ...))
WorldSize = create_model("WorldSize", world_size=(NonNegativeInt, ...))
Adapter = create_model("Adapter", lora_name=(str, ...))
