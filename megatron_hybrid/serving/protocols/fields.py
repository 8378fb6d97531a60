"""Fields of requests. Unknown ones are ignored. Those of OpenAI, Anthropic, vLLM and SGLang are
used, or refused unless they ask for nothing; labels change no answer. A value has the JSON type of
its field: neither a boolean nor "1" is a number; 1.0 is an integer, as in JSON Schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from megatron_hybrid.inference.requests.options import MAX_BREAKPOINTS, MAX_SALT, Positive, Priority
from megatron_hybrid.inference.sampling_params import (
    Bias,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    Temperature,
)
from megatron_hybrid.serving.http.changes import IMAGE_LEFT_OUT
from megatron_hybrid.serving.http.errors import ApiError, refusal_of_field
from megatron_hybrid.text.chat_template import OF_TEMPLATE, PART_TYPES, TextTooLongError
from megatron_hybrid.utils.field_help import fields_help
from megatron_hybrid.utils.other_names import REQUEST, advice, names_in_requests
from megatron_hybrid.utils.validation import Range


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT = {"type": "string"}
PART = {
    "anyOf": [
        _TEXT,
        _object(("type", "text"), type={"enum": [*PART_TYPES[:-1]]}, text=_TEXT),
        _object(("type", "refusal"), type={"const": "refusal"}, refusal=_TEXT),
    ]
}
_FUNCTION = _object(("name",), name=_TEXT, arguments={"type": ["string", "object"]})
MESSAGE = {
    **_object(
        ("role",),
        role={"type": "string", "minLength": 1},
        content={"anyOf": [_TEXT, {"type": "array", "items": PART}, {"type": "null"}]},
        tool_calls={"type": ["array", "null"], "items": _object(("function",), function=_FUNCTION)},
    ),
    "description": "`arguments` of a call are an object, or the JSON of one.",
    # There must be something in addition to the role.
    "not": {"properties": {"role": True}, "additionalProperties": {"type": "null"}},
}
"""The JSON Schema of a message that `chat_prompt` takes."""
_NEVER = (
    # OpenAI
    *("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"),
    *("background_options", "conversation", "image", "max_tool_calls", "multi_agent"),
    *("previous_response", "previous_response_id"),
    *("input", "instructions", "max_output_tokens"),  # but in responses
    # Anthropic
    *("container", "output_format"),
    # vLLM
    *("chat_template", "guided_decoding_backend", "guided_whitespace_pattern", "prompt_embeds"),
    "logprob_token_ids",
    # SGLang
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
    *("disagg_prefill_dp_rank", "images_config", "max_dynamic_patch", "min_dynamic_patch"),
    *("ngram_corpus_id", "routed_dp_rank", "session_id", "task"),
)
"""Known fields that are refused with any value but null."""
_NEUTRAL = (
    # A chat's template writes special tokens; spaces between them are the tokenizer's.
    (False, ("add_special_tokens", "guided_json_object", "return_prompt_text", "no_stop_trim")),
    (False, ("return_token_offsets", "use_beam_search", "watermarking", "return_meta_info")),
    (False, ("return_cached_tokens_details", "return_hidden_states", "return_prompt_token_ids")),
    (False, ("return_routed_experts", "use_audio_in_video", "background")),
    (False, ("enable_response_messages", "early_stopping", "return_logprob", "output_scores")),
    (True, ("do_sample", "detokenize")),
    (True, ("include_reasoning", "spaces_between_special_tokens", "separate_reasoning")),
    (True, ("stream_reasoning",)),
    ({}, ("kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "ec_transfer_params")),
    # In responses `reasoning` is used.
    ({}, ("vllm_xargs", "custom_labels", "custom_params", "reasoning", "session_params")),
    ([], ("functions", "logits_processors", "stop_regex", "access_programs", "mcp_servers")),
    ([], ("previous_input_messages", "fallbacks")),
    (0, ("routed_experts_prompt_start", "routed_experts_start_len")),
    (1, ("best_of", "length_penalty", "stream_interval", "num_beams", "num_beam_groups")),
    (1, ("num_return_sequences", "typical_p")),
    (["text"], ("modalities",)),
    ("", ("suffix",)),
    ("medium", ("verbosity",)),
)
"""A value that asks for nothing -> fields that are refused with any other."""
UNSUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(_NEVER, ()),
    **{name: (value,) for value, names in _NEUTRAL for name in names},
    "function_call": ("none", "auto"),
}
"""Known fields without an effect here -> values, in addition to null, that ask for nothing."""


def refuse_unsupported(given: Fields, unsupported: Mapping[str, Iterable]) -> None:
    """Raise ApiError for a field that asks for what this server lacks, or has by another name."""
    for name, value in (given.model_extra or {}).items():
        if name in unsupported and value is not None and not _is_in(value, unsupported[name]):
            remedy = advice(REQUEST, name, type(given).model_fields) or "leave it out"
            text = f"{name} is not supported: {remedy}"
            raise ApiError(400, text, name, "unsupported_parameter")


def _is_in(value: Any, values: Iterable) -> bool:
    """Return whether a value is in some, as `in` does, but False is not 0."""
    is_bool = isinstance(value, bool)
    return any(value == each and isinstance(each, bool) == is_bool for each in values)


def _fail_fast(schema: Any) -> None:
    """Let lists and mappings in a schema stop at their first error: millions of errors take minutes
    and gigabytes."""
    if isinstance(schema, list):
        for each in schema:
            _fail_fast(each)
    elif isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        for each in schema.values():
            _fail_fast(each)


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def _with_ints(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_ints(each) for each in value]
    return int(value) if _is_whole(value) else value


class Fields(BaseModel):
    """A body, or an object in one."""

    model_config = ConfigDict(
        extra="allow", protected_namespaces=(), strict=True, use_attribute_docstrings=True
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="wrap")
    @classmethod
    def _as_in_json(cls, given: Any, handler: Any) -> Self:
        """Take 1.0 as an integer, as JSON Schema does, and null as a field that is left out, as
        OpenAI's API does."""
        if isinstance(given, dict) and None in given.values():
            names = _left_out_by_null(cls)
            given = {k: v for k, v in given.items() if v is not None or k not in names}
        try:
            return handler(given)
        except ValidationError as error:
            errors = (
                e for e in error.errors() if e["type"] == "int_type" and _is_whole(e["input"])
            )
            names = {e["loc"][0] for e in errors}
            if not names:
                raise
            return handler({k: _with_ints(v) if k in names else v for k, v in given.items()})

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        found = handler(core_schema)
        properties = handler.resolve_ref_schema(found)["properties"]
        for name in _left_out_by_null(cls):
            about = properties[name].pop("description", "")
            properties[name] = {"anyOf": [properties[name], {"type": "null"}], "description": about}
        for name, nothing in cls.refused().items():
            values = [value for value in nothing if value is not None]
            properties[name] = {"enum": [*values, None], "description": "It is not supported."}
        return found

    @classmethod
    def refused(cls) -> dict[str, tuple]:
        """Return known fields that this object lacks -> values, besides null, without effect."""
        return {}


class Body(Fields):
    """A body."""

    taken: ClassVar[set[str]] = set()
    """Fields of other bodies that this one takes, too."""
    _changes: list[str] = PrivateAttr(default_factory=list)

    @property
    def changes(self) -> list[str]:
        """What was left out of the request, or moved in it: see the module `changes`."""
        return self._changes

    def note(self, change: str) -> None:
        """Add a change. Whatever leaves something out of the request, or changes it, calls this."""
        self._changes.append(change)

    def check(self) -> None:
        """Raise ApiError for a field that cannot be served."""
        refuse_unsupported(self, self.refused())

    @classmethod
    @cache
    def refused(cls) -> dict[str, tuple]:
        """Return `UNSUPPORTED`, fields with another name here, and those only of other bodies."""
        known = UNSUPPORTED
        if issubclass(cls, (SharedFields, OtherFields)):
            others = {
                name: () if field.is_required() else (field.default, [], {})
                for name, field in (CompletionFields.model_fields | ChatFields.model_fields).items()
            }
            known = dict.fromkeys(names_in_requests(), ()) | others | known
        used = cls.model_fields.keys() | cls.taken
        return {name: nothing for name, nothing in known.items() if name not in used}


@cache
def _left_out_by_null(kind: type[Fields]) -> frozenset[str]:
    """Return the fields with a default whose types exclude null."""
    return frozenset(
        field.alias or name
        for name, field in kind.model_fields.items()
        if not field.is_required() and type(None) not in get_args(field.annotation)
    )


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    """The stream ends with one more chunk, which has the usage; the others have `"usage": null`.
    The default is `continuous_usage_stats`."""
    continuous_usage_stats: bool = False
    """Each chunk has the usage up to this chunk, unless `include_usage` is false."""

    @property
    def counts(self) -> bool:
        """Whether the stream has the usage."""
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage


class JsonSchema(Fields):
    """The schema of a `response_format`."""

    name: str | None = None
    """A label. It has no effect."""
    schema_: dict[str, Any] | bool = Field(True, alias="schema")
    """The schema that the answer fits. A keyword that a guide cannot enforce is refused with
    400."""


FORMATS = ("text", "json_object", "json_schema", "structural_tag")


class ResponseFormat(Fields):
    """The form that an answer must have, as in OpenAI's API."""

    type: Literal[FORMATS]
    """The kind of the format."""
    json_schema: JsonSchema | None = None
    """The schema, which the type json_schema needs."""
    format: dict[str, Any] | None = None
    """The format of a structural tag, as xgrammar defines it: a text in which each tag has a given
    form."""
    structures: list[dict[str, Any]] | None = None
    """The tags of a structural tag in its older form, which also has `triggers`."""
    triggers: list[str] | None = None
    """Texts that begin a tag of `structures`."""
    at_least_one: bool | None = None
    """Whether the answer must have at least one of `structures`."""

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing: give it, or the type json_object")
        if self.type == "structural_tag" and self.format is None and self.structures is None:
            raise ValueError("format is missing: a structural tag needs one")
        return self

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The structural tag that the type structural_tag asks for."""
        names = {"format", "structures", "triggers", "at_least_one"}
        return self.model_dump(include=names, exclude_none=True)


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]
Salt = Annotated[Text, Field(max_length=MAX_SALT)]
Object = dict[str, Any]
Message = Annotated[Object, WithJsonSchema(MESSAGE)]
Something = Annotated[Object, Field(min_length=1)]


class StructuredOutputs(Fields):
    """The form that an answer must have, as in vLLM's API: one of these fields."""

    model_config = ConfigDict(extra="forbid")

    json_: Object | bool | Text | None = Field(None, alias="json")
    """The JSON Schema that the answer fits, as an object or as its JSON text."""
    regex: Text | None = None
    """The regular expression that the whole answer matches."""
    choice: Texts | None = None
    """Texts; the answer is one of them."""
    json_object: bool | None = None
    """Whether the answer is a JSON object, of any schema."""
    grammar: Text | None = None
    """A grammar in EBNF (GBNF) that begins with the rule `root`. It has at most 64 Ki characters,
    200 open brackets and 1000 repeats of a part."""
    structural_tag: Something | Text | None = None
    """A structural tag as in `response_format`, as an object or as its JSON text."""

    @property
    def wishes(self) -> dict[str, Any]:
        """The fields that are set, with their values."""
        hidden = None if self.json_object else {"json_object"}
        return self.model_dump(by_alias=True, exclude_none=True, exclude=hidden)


Count = Annotated[int, Range(ge=0)]
CountOrAll = Annotated[int, Range(ge=-1)]
Token = Count
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Tokens = Annotated[list[Token], Field(min_length=1)]
Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=64)]
"""Limited, since every new token is checked against all of them."""
NumTop = Annotated[int, Range(ge=0, le=20)]


def declared(name: str, more: str = "", default: Any = None) -> Any:
    """Return a field of the engine's with its help there, and `more` for this API alone."""
    return Field(default, description=f"{_DECLARED[name].sentence} {more}".strip())


_DECLARED = fields_help("megatron_hybrid.inference.sampling_params.SamplingParams") | fields_help(
    "megatron_hybrid.inference.requests.options.RequestOptions"
)


class SharedFields(Body):
    """Fields of all routes that generate."""

    model: str | None = None
    """The name of the served model. It may be left out."""
    temperature: Temperature | None = declared(
        "temperature",
        "The defaults of this field, `top_p`, `top_k` and `min_p` are those of the model's "
        "generation_config.json.",
    )
    top_p: Share | None = declared("top_p")
    top_k: CountOrAll | None = None
    """Tokens are drawn from this many most likely ones; 0 and -1 keep all tokens."""
    min_p: Share | None = declared("min_p")
    presence_penalty: Penalty | None = declared("presence_penalty")
    frequency_penalty: Penalty | None = declared("frequency_penalty")
    repetition_penalty: RepetitionPenalty | None = declared("repetition_penalty")
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = declared(
        "logit_bias"
    )
    min_tokens: Count | None = declared("min_tokens")
    seed: Seed | None = declared("seed")
    stop: Annotated[str, Field(max_length=1024)] | Words | None = None
    """Texts that end the answer. An empty text has no effect; an empty text in a list is refused
    with 400."""
    stop_token_ids: Annotated[list[Token], Field(max_length=1024)] | None = declared(
        "stop_token_ids"
    )
    include_stop_str_in_output: bool = False
    """The answer includes the text of `stop` that ended it."""
    ignore_eos: bool = False
    """The model's own stop tokens do not end the answer."""
    skip_special_tokens: bool = True
    """Texts leave out special tokens. If false, texts include them, except the stop token that ends
    an answer."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer must have. It is refused with 400 next to another field that sets a
    form."""
    stream: bool = False
    """The answer is sent as server-sent events."""
    cache_salt: Salt | None = declared("salt")
    cache_breakpoints: Annotated[list[Positive], Field(max_length=MAX_BREAKPOINTS)] | None = (
        declared("cache_breakpoints")
    )
    truncate_prompt_tokens: CountOrAll | None = None
    """The prompt is cut to this many tokens; -1 keeps as many as leave room for the answer. 0 is
    refused with 400."""
    truncation_side: Literal["left", "right"] = "left"
    """The end at which the prompt is cut: left keeps its last tokens, right its first."""
    allowed_token_ids: Tokens | None = declared(
        "allowed_token_ids", "The field is refused with 400 next to a guide."
    )
    bad_words: Words | None = None
    """Words that the answer must not have. Each word is tokenized with and without one space before
    it, and its last token is not drawn after the others. The same word can still appear as other
    tokens. The field is refused with 400 next to a guide."""
    thinking_token_budget: CountOrAll | None = None
    """The most tokens of reasoning; after them the token that ends reasoning, such as </think>, is
    drawn. -1 sets no limit. The field is refused with 400 for a model whose reasoning is not
    between two tokens, and next to `allowed_token_ids`."""
    num_speculative_tokens: Count | None = declared("num_speculative_tokens")
    priority: Priority = declared("priority", default=0)
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A label of the request, which replaces the header X-Request-Id. Several requests may have the
    same label; /abort ends those that have the caller's API key."""


class GenerationFields(SharedFields):
    """Fields of completions and chats."""

    own_names: ClassVar[dict[str, str]] = {}
    """Its fields -> those of the body that it was made from, if that is another's."""

    n: Positive = 1
    """Answers to each prompt. Each counts as a request."""
    response_format: ResponseFormat | None = None
    """The form that the answer must have, as in OpenAI's API."""
    stream_options: StreamOptions | None = None
    """Options of a stream. They are refused with 400 without `stream`."""
    prompt_logprobs: NumTop | None = None
    """The answer has log-probabilities of the prompt's tokens, with this many most likely tokens at
    each position. The whole prompt is computed. A prompt token that is not among the most likely
    ones has the `rank` null. The field is refused with 400 in a stream."""
    return_token_ids: bool = False
    """The answer has `token_ids`; `weight_epochs`, which name the weights that drew each token; and
    `prompt_token_ids`: in each choice of a completion, once in a chat, and in the first chunk of a
    stream."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name every token as `token_id:N`."""

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer. Clients send an empty one for none."""
        return [self.stop] if isinstance(self.stop, str) and self.stop else list(self.stop or ())

    @property
    def num_top(self) -> int | None:
        """Most likely tokens to show in place of each of the answer's; None without
        log-probabilities."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.prompt_logprobs is not None

    @property
    def caller_names(self) -> dict[str, str]:
        """Names in the engine's errors -> the caller's fields."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options need stream=true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            text = "prompt_logprobs are not supported in a stream: leave out one of the two"
            raise ApiError(400, text, "prompt_logprobs")


class CompletionFields(GenerationFields):
    """Body of /v1/completions."""

    prompt: str | Tokens | Texts | Annotated[list[Tokens], Field(min_length=1)]
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    max_tokens: Count | None = 16
    """The most tokens of an answer. 0 computes the prompt alone; null allows as many as there is
    room for, and the default at most that many."""
    logprobs: NumTop | None = None
    """The answer has log-probabilities of its tokens, with this many most likely tokens at each
    position. `top_logprobs` includes the drawn token. A token that is a part of a character is
    named by its bytes, such as `bytes:\\xe2`. If several tokens have the same text, all but one are
    named `token_id:N`."""
    echo: bool = False
    """The text of the answer begins with the prompt; a stream sends the prompt as its first chunk.
    The field is refused with 400 in a stream with `logprobs`."""
    add_special_tokens: bool = True
    """The tokenizer's special tokens, such as a token of the beginning, are added to a prompt that
    is a text."""

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted. `echo` shows them, too."""
        return super().scores_prompt or (self.echo and self.logprobs is not None)

    @property
    def caller_names(self) -> dict[str, str]:
        return {"prompt": "prompt", "top_n_logprobs": "logprobs"}

    def check(self) -> None:
        super().check()
        if self.echo and self.stream and self.logprobs is not None:
            text = "echo with logprobs is not supported in a stream: leave out one of the three"
            raise ApiError(400, text, "echo")


class Function(Fields):
    """A function that an answer may call."""

    name: Text
    """The name of the function."""
    description: str | None = None
    """A description of the function, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON Schema of the arguments. A `$ref` may refer to definitions in the same schema."""


class Tool(Fields):
    """A function."""

    type: Literal["function"]
    """The kind of the tool."""
    function: Function
    """The function that may be called."""


class SharedTemplateFields(Body):
    """Fields of the chat template, on all routes with chats."""

    chat_template_kwargs: Object | None = None
    """Variables of the template. They take precedence over the variables of `reasoning_effort`.
    Names of other fields, such as tools, are refused with 400."""
    documents: list[Object] | None = None
    """Documents for a template that shows documents."""


class SharedChatFields(SharedTemplateFields, SharedFields):
    """Fields of all routes that answer chats."""

    tool_choice: str | Object | None = None
    """auto, none, required, or the name of a function. required and a name guide the answer; a name
    allows one call."""
    parallel_tool_calls: bool = True
    """If false, the answer has its first call alone."""


class TemplateFields(SharedTemplateFields):
    """Fields of the prompt that the chat template writes."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    """The messages of the chat."""
    add_generation_prompt: bool = True
    """The template writes the beginning of the assistant's answer after the messages."""
    continue_final_message: bool = False
    """The answer continues the last message, which must be the assistant's."""
    reasoning_effort: str | None = None
    """A variable of the template. It also sets the variables `enable_thinking` and `thinking`,
    which are false if it is none."""
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """Functions that the answer may call."""

    @model_validator(mode="after")
    def _leave_out_images(self) -> Self:
        for message in self.messages or ():
            parts = message.get("content") if message.get("role") == "tool" else None
            for index, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and part.get("type") in ("image_url", "input_image"):
                    parts[index] = {"type": "text", "text": IMAGE_LEFT_OUT}
                    self.note("left out an image of a tool's result")
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the template."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if effort is not None:  # templates have several names for this variable
            thinks = effort != "none"
            given |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        return given | (self.chat_template_kwargs or {})

    def too_large(self, error: TextTooLongError) -> ApiError:
        """Return the refusal of a chat that cannot fit the context, however it is tokenized."""
        return ApiError(400, str(error), "messages", "context_length_exceeded")

    @cached_property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Functions for the template."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None

    def check(self) -> None:
        super().check()
        if names := OF_TEMPLATE & (self.chat_template_kwargs or {}).keys():
            text = f"chat_template_kwargs cannot have {min(names)}: give the field of this name"
            raise ApiError(400, text, "chat_template_kwargs")
        last = (self.messages or [{}])[-1]
        if self.continue_final_message and last.get("role") != "assistant":
            raise ApiError(
                400,
                "continue_final_message needs a last message of the assistant's",
                "continue_final_message",
            )


class ChatFields(TemplateFields, SharedChatFields, GenerationFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    """The messages of the chat. A `content` that is a list of texts is joined by newlines, or
    passed as parts to a template that writes parts. Other parts, such as images, are refused with
    400. If the template has no role developer, such a message gets the role system. The template
    gets the `reasoning` of the assistant's messages."""
    max_tokens: Count | None = None
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: Count | None = None
    """The most tokens of an answer, reasoning included. By default an answer has as many as there
    is room for."""
    logprobs: bool = False
    """Whether the answer's tokens have log-probabilities."""
    top_logprobs: NumTop | None = None
    """The number of most likely tokens that are shown at each position. The field is refused with
    400 without `logprobs`."""
    echo: bool = False
    """The text of the answer begins with the assistant's last message."""

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def required_tools(self) -> list[Function]:
        """Functions of which the answer has to call one; empty if it may call none."""
        functions = [tool.function for tool in self.tools or ()]
        if self.tool_choice == "required":
            return functions
        if not isinstance(self.tool_choice, dict):
            return []
        named = self.tool_choice.get("function", self.tool_choice)  # flat in /v1/responses
        return [function for function in functions if function.name == named.get("name")]

    @property
    def may_call_several(self) -> bool:
        """Whether the answer may have more than one call. A named function is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, dict)

    @property
    def parsed_by(self) -> dict[str, Any]:
        """Arguments of an `AnswerParser`."""
        tools = [] if self.tool_choice == "none" else self.shown_tools or []
        most, must_call = None if self.may_call_several else 1, bool(self.required_tools)
        return {"tools": tools, "max_calls": most, "must_call": must_call}

    @property
    def caller_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {"prompt": "messages", "num_tokens_to_generate": limit}
        names |= {"stop_words": "stop", "thinking_budget": "thinking_token_budget"}
        return {name: self.own_names.get(given, given) for name, given in names.items()}

    def too_large(self, error: TextTooLongError) -> ApiError:
        """Return the refusal in the words of `too_long`: the text is not counted to its end."""
        asked = self.max_completion_tokens or self.max_tokens or 0
        return self.too_long(error.num_tokens, asked, error.max_tokens, "at least ")

    def too_long(self, num_prompt: int, num_asked: int, limit: int, least: str = "") -> ApiError:
        """Return the refusal of a prompt and an answer of more tokens than the context has, in the
        words that clients of OpenAI read.

        num_prompt, num_asked, limit: tokens of the prompt, the answer, and the context.
        least: words before the number of tokens of a prompt that may have more.
        """
        text = (
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{least}{num_prompt + num_asked} tokens ({least}{num_prompt} in the messages, "
            f"{num_asked} in the completion). Please reduce the length of the messages or "
            f"completion, or raise --context={limit}."
        )
        names = self.caller_names
        param = names["prompt" if num_prompt >= limit else "num_tokens_to_generate"]
        return ApiError(400, text, param, "context_length_exceeded")

    def check(self) -> None:
        super().check()
        if self.tool_choice not in (None, "none", "auto") and not self.required_tools:
            given = "needs a tool" if self.tool_choice == "required" else f"is {self.tool_choice!r}"
            tools = [tool.function.name for tool in self.tools or ()]
            left_out = "; ".join(each for each in self.changes if "left out the tool" in each)
            text = f"{given}, and tools are {tools}{left_out and f' (this server {left_out})'}"
            raise ApiError(
                400, f"tool_choice {text}: name one of them, or say auto or none", "tool_choice"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")


class OtherFields(Body):
    """A body that is answered as a chat."""

    chat: ClassVar[type[ChatFields]]
    left_out: ClassVar[dict[str, tuple]]
    """Fields without effect -> values that ask for nothing. The answer names the fields."""

    def chat_of(self, given: Mapping[str, Any]) -> ChatFields:
        """Return the chat of some fields.

        Raises:
            ApiError: a chat cannot have them.
        """
        for name, nothing in self.left_out.items():
            if getattr(self, name) not in (None, *nothing):
                self.note(f"left out {name}")
        try:
            chat = self.chat(**given)
        except ValidationError as error:
            raise refusal_of_field(error.errors()) from error
        chat.changes.extend(self.changes)
        return chat


def _kind_of(given: Any) -> str:
    is_chat = isinstance(given, dict) and "messages" in given
    return (ChatFields if is_chat else CompletionFields).__name__


AnyGeneration = Annotated[
    Annotated[ChatFields, Tag("ChatFields")] | Annotated[CompletionFields, Tag("CompletionFields")],
    Discriminator(_kind_of),
]
"""Body of /invocations: that of a chat if it has `messages`, or else that of a completion."""


class TokenizeFields(TemplateFields):
    """Body of /tokenize."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    model: str | None = None
    """The name of the served model. It may be left out."""
    prompt: str | None = None
    """A text. Give either this field or `messages`."""
    add_special_tokens: bool = True
    """The tokenizer's special tokens are added to `prompt`."""
    return_token_strs: bool = False
    """The answer also has the text of each token."""


class DetokenizeFields(Body):
    """Body of /detokenize."""

    model: str | None = None
    """The name of the served model. It may be left out."""
    tokens: list[Token]
    """The token ids."""
    skip_special_tokens: bool = True
    """The text leaves out special tokens."""


class ExplainFields(TokenizeFields):
    """Body of /cache/explain."""

    cache_salt: Annotated[str, Field(max_length=MAX_SALT)] | None = None
    """Explain the prompt of a request with this salt."""
    api_key: str | None = None
    """Explain the prompt of a request with this key. By default it is the key that asks. Each of
    several keys has prefixes of its own, unless the server has --share-cache."""


class UnloadAdapterFields(Body):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str
    """The name that the adapter is served under, as a `model` of requests."""


class LoadAdapterFields(UnloadAdapterFields):
    """Body of /v1/load_lora_adapter."""

    lora_path: str
    """The adapter's folder, in PEFT's format, on the server's disk."""
    load_inplace: Literal[False] | None = None
    """It has no effect: a loaded adapter must be unloaded first."""


class AbortFields(Body):
    """Body of /abort."""

    request_id: str
    """The label of the requests to end, from their header X-Request-Id or their field
    `request_id`."""
