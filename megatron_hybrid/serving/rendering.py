"""Requests to prompts and sampling parameters: tokenizing, in a thread beside the event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_hybrid.inference.request_builder import Prompt, RenderedChat, check_messages
from megatron_hybrid.inference.sampling_params import SamplingParams, ThinkingBudget
from megatron_hybrid.serving.errors import ApiError, refusal_of
from megatron_hybrid.serving.fields import (
    PART_TYPES,
    ChatFields,
    CompletionFields,
    Function,
    GenerationFields,
    TemplateFields,
)
from megatron_hybrid.serving.parsing import END_THINK, THINK
from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.tokenizer import Tokenizer

Json = dict[str, Any]


def chat_prompt(tokenizer: Tokenizer, fields: TemplateFields) -> RenderedChat:
    """The tokens of a chat. fields: with messages.

    Raises:
        ApiError: the template refuses it.
    """
    tools, variables = fields.shown_tools, fields.variables
    try:
        check_messages(fields.messages or ())
        messages = _for_template(tokenizer, fields.messages or ())
        if not fields.continue_final_message:
            given = (messages, fields.add_generation_prompt, tools)
            return RenderedChat(*tokenizer.chat_prompt(*given, **variables))
        text = tokenizer.render_chat(messages, False, tools, **variables)
        said = messages[-1].get("content")
        if not isinstance(said, str) or said.strip() not in text:
            raise ValueError("the template does not show the last message as it is")
        # Without what the template writes behind the message, such as the end of its turn.
        end = text.rindex(said.strip()) + len(said.strip())
        return RenderedChat(tokenizer.tokenize(text[:end], add_special_tokens=False))
    except (TypeError, ValueError) as error:
        param = "messages" if fields.chat_template is None else "chat_template"
        raise ApiError(400, str(error), param) from error


def has_thoughts(tokenizer: Tokenizer) -> bool:
    """Whether answers to chats may begin with reasoning."""
    return THINK in (tokenizer.chat_template or "")


def begins_in_thought(tokenizer: Tokenizer, fields: TemplateFields) -> bool:
    """Whether the prompt ends inside of reasoning, which the template begins, or the message that
    the answer goes on with. The chat is one that `chat_prompt` takes."""
    messages, tools = _for_template(tokenizer, fields.messages or ()), fields.shown_tools
    if fields.continue_final_message:
        said = messages[-1]["content"]
        return said.rfind(THINK) > said.rfind(END_THINK)
    given = messages, fields.add_generation_prompt, tools
    return tokenizer.render_chat(*given, **fields.variables).rstrip().endswith(THINK)


def thinking_budget(
    tokenizer: Tokenizer, max_tokens: int, may_think: bool, begins_inside: bool
) -> ThinkingBudget:
    """Of the reasoning of a chat's answer.

    Args:
        may_think: the answer may have reasoning.
        begins_inside: it begins with that.

    Raises:
        ApiError: this model's reasoning cannot be ended by a token.
    """
    ids = [tokenizer.tokenize(mark, add_special_tokens=False) for mark in (THINK, END_THINK)]
    if not may_think or list(map(len, ids)) != [1, 1]:
        name = "thinking_token_budget"
        text = f"{name} needs a model with reasoning between the tokens {THINK} and {END_THINK}"
        raise ApiError(400, f"{text}: leave it out", name)
    (start,), (end,) = ids
    return ThinkingBudget(max_tokens, end, start, begins_inside)


def _for_template(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages as templates expect them: tool calls have objects as arguments, which OpenAI's
    clients send as JSON in strings; a list of texts is one text, unless the template wants parts.

    Raises:
        ValueError: a part is no text, or the arguments of a call are no JSON.
    """
    found = []
    for index, message in enumerate(messages):
        message = dict(message)
        if isinstance(message.get("content"), list):
            texts = [_part_text(index, part) for part in message["content"]]
            message["content"] = "\n".join(texts)
            if tokenizer.takes_parts(message["role"]):
                message["content"] = [{"type": "text", "text": text} for text in texts]
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_with_object(index, call) for call in message["tool_calls"]]
        found.append(message)
    return found


def _part_text(index: int, part: Any) -> str:
    """The text of a part of a message's content."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in PART_TYPES else None
    if not isinstance(text, str):
        raise ValueError(
            f"message {index} of the chat has a part that is no text, {part!r:.80}: this server "
            'takes {"type": "text", "text": ...} alone'
        )
    return text


def _with_object(index: int, call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"message {index} of the chat has a tool call without a function")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except RecursionError:
            raise ValueError("the arguments of a call are nested too deeply") from None
    return {**call, "function": function}


def completion_prompts(tokenizer: Tokenizer, fields: CompletionFields) -> list[Sequence[int]]:
    """The tokens of each prompt.

    Raises:
        ApiError: a prompt is empty, or has half of a character.
    """
    prompts = fields.prompt
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    try:
        found = [
            tokenizer.tokenize(prompt, fields.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
    except ValueError as error:
        raise ApiError(400, str(error), "prompt") from error
    if not all(map(len, found)):
        raise ApiError(400, "a prompt is empty: give at least one token", "prompt")
    return found


def truncated(prompt: Prompt, num_tokens: int, side: str) -> Prompt:
    """The last tokens of a prompt.

    Args:
        num_tokens: that are left, 1 or more.
        side: "left", where it is cut; or "right": the first tokens are left.
    """
    tokens = prompt.tokens if isinstance(prompt, RenderedChat) else prompt
    cut = max(0, len(tokens) - num_tokens) if side == "left" else 0
    tokens = tokens[cut : cut + num_tokens]
    if not isinstance(prompt, RenderedChat):
        return tokens
    starts = [start - cut for start in prompt.message_starts]
    return RenderedChat(tokens, [start for start in starts if 0 < start <= len(tokens)])


def guide_of(fields: GenerationFields) -> tuple[Guide, str] | None:
    """What the answer may look like, and the field that asks for it.

    Raises:
        ApiError: a schema or a regex that cannot be kept to, or several wishes at a time.
    """
    wishes = list(_wishes(fields))
    if len(wishes) > 1:
        names = " and ".join(name for name, _ in wishes)
        raise ApiError(400, f"{names} both say what the answer looks like: give one", wishes[1][0])
    for name, make in wishes:
        try:
            return make(), name
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"{name}: {error}", name) from error
    return None


def _wishes(fields: GenerationFields) -> Iterator[tuple[str, Callable[[], Guide]]]:
    """Fields that ask for a guide, and what makes it."""
    form, wanted = fields.response_format, fields.structured_outputs
    if form is not None and form.type == "json_object":
        yield "response_format", Guide.json_object
    if form is not None and form.type == "json_schema":
        schema = True if form.json_schema is None else form.json_schema.schema_
        yield "response_format", partial(Guide.json_schema, schema, check=False)
    if form is not None and form.type == "structural_tag":
        yield "response_format", partial(Guide.structural_tag, form.structural_tag, check=False)
    if wanted is not None:
        makers = {
            "json": partial(Guide.json_schema, check=False),
            "regex": Guide.regex,
            "choice": Guide.choices,
            "grammar": Guide.grammar,
            "structural_tag": partial(Guide.structural_tag, check=False),
            "json_object": lambda value: Guide.json_object(),
        }
        for name, value in wanted.wishes.items():
            yield "structured_outputs", partial(makers[name], value)
    if isinstance(fields, ChatFields) and (functions := fields.required_tools):
        # A process of its own checks schemas.
        yield "tool_choice", partial(Guide.json_schema, call_schema(functions), check=False)


def call_schema(functions: Sequence[Function]) -> Json:
    """The schema of a call of one of some functions. A `$ref` of its parameters is relative to
    these, so they stand under names of their own."""
    definitions, calls = {}, []
    for index, function in enumerate(functions):
        parameters = {k: v for k, v in (function.parameters or {}).items() if k != "$id"}
        if "$ref" not in parameters:
            parameters = {"type": "object", **parameters}
        place = f"#/$defs/{index}"
        definitions[str(index)] = _with_refs_to(place, parameters)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [function.name]}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**call, "$defs": definitions}


_VALUES = ("const", "default", "enum", "examples")
"""Keywords that hold values, no schemas."""


def _with_refs_to(place: str, schema: Any) -> Any:
    """A schema whose `$ref`s are relative to a place in another one."""
    if isinstance(schema, list):
        return [_with_refs_to(place, each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: value if name in _VALUES else _with_refs_to(place, value)
        for name, value in schema.items()
    }
    ref = found.get("$ref")
    if isinstance(ref, str) and re.match("#(/|$)", ref):
        found["$ref"] = place + ref.removeprefix("#")
    return found


def sampling_params(
    tokenizer: Tokenizer, fields: GenerationFields, max_tokens: int
) -> SamplingParams:
    """What the engine samples by.

    Args:
        tokenizer: for words.
        max_tokens: of the answer.

    Raises:
        ApiError: an illegal value, with its field.
    """
    # In the answer a word may stand at the beginning of a token, or behind a space that is in it.
    words = [spelt for word in fields.bad_words or () for spelt in (word, f" {word}")]
    try:
        return SamplingParams(
            temperature=fields.temperature,
            top_k=None if fields.top_k is None else max(0, fields.top_k),  # vLLM: -1 keeps all
            top_p=fields.top_p,
            min_p=fields.min_p,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=fields.repetition_penalty,
            logit_bias=fields.logit_bias or None,
            allowed_token_ids=fields.allowed_token_ids or None,
            bad_words_ids=[tokenizer.tokenize(word, add_special_tokens=False) for word in words],
            min_tokens=fields.min_tokens,
            seed=fields.seed,
            num_tokens_to_generate=max_tokens,
            stop_words=fields.stops,
            stop_token_ids=fields.stop_token_ids or (),
            detokenize_stop_sequence=fields.include_stop_str_in_output,
            ignore_termination=fields.ignore_eos,
            skip_special_tokens=fields.skip_special_tokens,
            return_log_probs=fields.num_top is not None or fields.scores_prompt,
            skip_prompt_log_probs=not fields.scores_prompt,
            top_n_logprobs=max(fields.num_top or 0, fields.prompt_logprobs or 0),
        )
    except (TypeError, ValueError) as error:
        raise refusal_of(error, fields.caller_names) from error
