"""Requests to prompts and sampling parameters: tokenizing, in a thread next to the event loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_hybrid.inference.requests.builder import Prompt, RenderedChat
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams, ThinkingBudget
from megatron_hybrid.serving.http.changes import with_steady_start
from megatron_hybrid.serving.http.errors import ApiError, refusal_of
from megatron_hybrid.serving.parsers.choice import Style
from megatron_hybrid.serving.parsers.dialect import ReasoningFormat
from megatron_hybrid.serving.protocols.fields import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    TemplateFields,
)
from megatron_hybrid.text.chat_template import TextTooLongError
from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.tokenizer import Tokenizer

Json = dict[str, Any]
_END_TOKENS = 64
"""Tokens at a prompt's end in which a mark of reasoning is looked for."""


def chat_prompt(
    tokenizer: Tokenizer, fields: TemplateFields, keeps_lines: bool = True
) -> RenderedChat:
    """Render and tokenize a chat.

    Args:
        tokenizer: has the chat template.
        fields: have the messages.
        keeps_lines: see `ServingConfig.keeps_changing_lines`.

    Raises:
        ApiError: the template refuses it, or it cannot fit the context.
    """
    tools, variables = fields.shown_tools, fields.variables
    try:
        messages = tokenizer.template_of(tools).prepare(fields.messages or ())
        if not keeps_lines:
            messages, changes = with_steady_start(messages)
            for change in changes:
                fields.note(change)
        if not fields.continue_final_message:
            given = (messages, fields.add_generation_prompt, tools)
            return RenderedChat(*tokenizer.chat_prompt(*given, **variables))
        text = tokenizer.render_chat(messages, False, tools, **variables)
        said = messages[-1].get("content")
        if not isinstance(said, str) or said.strip() not in text:
            raise ValueError("the template does not show the last message as it is")
        # Cut off the template's text after the message, such as the end of its turn.
        end = text.rindex(said.strip()) + len(said.strip())
        return RenderedChat(tokenizer.tokenize(text[:end], add_special_tokens=False))
    except TextTooLongError as error:
        raise fields.too_large(error) from error
    except (TypeError, ValueError) as error:
        raise ApiError(400, str(error), "messages") from error


def is_thinking(
    tokenizer: Tokenizer,
    fields: GenerationFields | TemplateFields,
    thoughts: ReasoningFormat,
    prompt: RenderedChat | Sequence[int],
) -> bool | None:
    """Return whether the answer begins inside of reasoning, or None if the prompt has closed it.
    The prompt's end may open it, or the message that the answer continues, or the model itself
    without a mark. `prompt` is made from the fields."""
    if isinstance(fields, TemplateFields) and fields.continue_final_message:
        template = tokenizer.template_of(fields.shown_tools)
        said = template.prepare(fields.messages)[-1]["content"]
        return said.rfind(thoughts.open) > said.rfind(thoughts.close) or None
    tokens = prompt.tokens if isinstance(prompt, RenderedChat) else prompt
    text = tokenizer.detokenize(tokens[-_END_TOKENS:], skip_special_tokens=False).rstrip()
    if text.endswith(thoughts.close):
        return None
    return text.endswith(thoughts.open.rstrip()) or thoughts.always


def thinking_budget(
    tokenizer: Tokenizer, max_tokens: int, thoughts: ReasoningFormat | None, begins_inside: bool
) -> ThinkingBudget:
    """Return the budget of the reasoning of a chat's answer.

    Args:
        thoughts: how the model writes reasoning, None if it writes none.
        begins_inside: whether the answer begins inside of it.

    Raises:
        ApiError: this model's reasoning cannot be ended by a token.
    """
    name = "thinking_token_budget"
    marks = () if thoughts is None else (thoughts.open, thoughts.close)
    ids = [tokenizer.tokenize(mark, add_special_tokens=False) for mark in marks]
    if list(map(len, ids)) != [1, 1]:
        found = f"; this model's marks are {' and '.join(marks)}" if marks else ""
        text = f"{name} needs a model with reasoning between two tokens, such as <think> and "
        raise ApiError(400, f"{text}</think>{found}: leave it out", name)
    (start,), (end,) = ids
    return ThinkingBudget(max_tokens, end, start, begins_inside)


def completion_prompts(tokenizer: Tokenizer, fields: CompletionFields) -> list[Sequence[int]]:
    """Return the tokens of each prompt.

    Raises:
        ApiError: a prompt is empty, cannot fit the context, or has half of a character.
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
        raise refusal_of_text(error) from error
    if not all(map(len, found)):
        raise ApiError(400, "a prompt is empty: give at least one token", "prompt")
    return found


def refusal_of_text(error: ValueError) -> ApiError:
    """Return the refusal for the tokenizer's error about the field `prompt`."""
    is_long = isinstance(error, TextTooLongError)
    return ApiError(400, str(error), "prompt", "context_length_exceeded" if is_long else None)


def truncated(prompt: Prompt, num_tokens: int | None, side: str) -> Prompt:
    """Cut a prompt to `num_tokens`, None for all. `Tokenizer.cut_to` describes `side`."""
    if num_tokens is None:
        return prompt
    tokens = prompt.tokens if isinstance(prompt, RenderedChat) else prompt
    cut = max(0, len(tokens) - num_tokens) if side == "left" else 0
    tokens = tokens[cut : cut + num_tokens]
    if not isinstance(prompt, RenderedChat):
        return tokens
    starts = [start - cut for start in prompt.message_starts]
    return RenderedChat(tokens, [start for start in starts if 0 < start <= len(tokens)])


def guide_of(
    fields: GenerationFields, style: Style | None = None, is_thinking: bool | None = None
) -> tuple[Guide, str] | None:
    """Return the guide of the answer after its reasoning, and the caller's field that asks for it;
    or None.

    Args:
        style: how the model answers a chat.
        is_thinking: see the function of this name.

    Raises:
        ApiError: a schema or a regex cannot be enforced, or several fields ask for a form.
    """
    wishes = list(_wishes(fields, style))
    if len(wishes) > 1:
        names = " and ".join(name for name, _ in wishes)
        text = f"{names} both say what the answer looks like: give one"
        raise ApiError(400, text, wishes[0][0].partition(".")[0])
    for place, make in wishes:
        name = place.partition(".")[0]
        try:
            guide, own_name = make(), fields.own_names.get(name, name)
            if style is None:
                return guide, own_name
            prefix = "" if name == "tool_choice" else style.dialect.content_begin
            marks = "", ""
            if style.thoughts is not None and is_thinking is not None:
                marks = style.thoughts.open, style.thoughts.close
            if any((prefix, *marks)):
                guide = guide.after_reasoning(
                    *marks, begins_inside=bool(is_thinking), prefix=prefix
                )
            return guide, own_name
        except RecursionError:
            raise ApiError(400, f"{place}: a schema is nested too deeply", name) from None
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"{place}: {error}", name) from error
    return None


def _wishes(
    fields: GenerationFields, style: Style | None
) -> Iterator[tuple[str, Callable[[], Guide]]]:
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
            yield f"structured_outputs.{name}", partial(makers[name], value)
    if style is not None and isinstance(fields, ChatFields) and fields.required_tools:
        functions = [function.model_dump() for function in fields.required_tools]

        def calls() -> Guide:
            form = style.dialect.form(functions, fields.may_call_several)
            tag = {"type": "structural_tag", "format": form}
            return Guide.structural_tag(tag, check=False)  # a process of its own checks schemas

        yield "tool_choice", calls


def request_options(
    fields: GenerationFields,
    salt: str,
    tenant: str,
    guide: Guide | None,
    headers: Mapping[str, str],
    adapter: str | None = None,
) -> RequestOptions:
    """Return the engine's options of a request, in addition to prompt and sampling.

    Args:
        salt, tenant, headers: those of the caller.
        adapter: the one that the request's `model` names.

    Raises:
        ApiError: an illegal value, with its field.
    """
    try:
        return RequestOptions(
            guide=guide,
            salt=salt,
            adapter=adapter,
            cache_breakpoints=fields.cache_breakpoints or (),
            n=fields.n,
            priority=fields.priority,
            tenant=tenant,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )
    except (TypeError, ValueError) as error:
        raise refusal_of(error, fields.caller_names) from error


def sampling_params(
    tokenizer: Tokenizer, fields: GenerationFields, max_tokens: int
) -> SamplingParams:
    """Return the engine's sampling parameters for a request.

    Args:
        tokenizer: tokenizes the words of `bad_words`.
        max_tokens: most tokens of the answer.

    Raises:
        ApiError: an illegal value, with its field.
    """
    allowed, most = fields.allowed_token_ids or (), tokenizer.vocab_size
    if len(allowed) > most:
        text = f"allowed_token_ids has {len(allowed)} ids, and the vocabulary {most}: give each"
        raise ApiError(400, f"{text} once", "allowed_token_ids")
    # In the answer a word may begin a token, or follow a space in it.
    words = [word.lstrip() or word for word in fields.bad_words or ()]
    words += [f" {word}" for word in words]
    try:
        return SamplingParams(
            temperature=fields.temperature,
            top_k=None if fields.top_k is None else max(0, fields.top_k),  # vLLM: -1 keeps all
            top_p=fields.top_p,
            min_p=fields.min_p,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=fields.repetition_penalty,
            logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
            allowed_token_ids=fields.allowed_token_ids,
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
            num_speculative_tokens=fields.num_speculative_tokens,
        )
    except (TypeError, ValueError) as error:
        raise refusal_of(error, fields.caller_names) from error
