"""PreparedRequest: the fields of a request as prompts and parameters of the engine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hybrid.inference.requests.builder import Prompt, RenderedChat
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.choice import Style
from megatron_hybrid.serving.protocols.fields import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    TemplateFields,
)
from megatron_hybrid.serving.protocols.messages import MessageChat
from megatron_hybrid.serving.protocols.request_mapping import (
    chat_prompt,
    completion_prompts,
    guide_of,
    is_thinking,
    sampling_params,
    thinking_budget,
    truncated,
)
from megatron_hybrid.serving.service import Service
from megatron_hybrid.text.guide import Guide

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRequest:
    """The prompts and parameters that the engine gets."""

    prompts: list[Prompt]
    params: SamplingParams
    guide: tuple[Guide, str] | None
    """A guide, and the field that asks for it."""
    style: Style | None
    """How the model answers a chat, None if this is no chat."""
    is_thinking: bool
    """Whether the answer begins inside of reasoning."""


def prepare(service: Service, fields: GenerationFields) -> PreparedRequest:
    """Tokenize a request, and read its parameters; for a thread.

    Raises:
        ApiError: it cannot be served.
    """
    prompts, tokenizer = prompts_of(service, fields), service.tokenizer
    is_chat, budget = isinstance(fields, ChatFields), fields.thinking_token_budget
    style, thinks = None, None
    if is_chat or budget not in (None, -1):
        template = tokenizer.template_source(fields.shown_tools if is_chat else None)
        style = service.config.style_of(template)
        if style.thoughts is not None:
            found = {is_thinking(tokenizer, fields, style.thoughts, each) for each in prompts}
            if len(found) > 1:
                text = "thinking_token_budget needs prompts that all end in reasoning, or none"
                raise ApiError(400, f"{text}: send them one by one", "prompt")
            (thinks,) = found
    guide = guide_of(fields, style, thinks)
    params = _params(service, fields, prompts)
    if budget not in (None, -1):
        given = budget, style.thoughts, bool(thinks)
        try:
            params.thinking_budget = thinking_budget(tokenizer, *given)
        except ApiError:
            if not isinstance(fields, MessageChat):  # its clients give one to all models
                raise
            fields.note("left out thinking.budget_tokens: this model has none to end")
    if is_chat and service.config.logs_prompts:
        logger.info("prompt: %s", tokenizer.detokenize(prompts[0].tokens, False))
    return PreparedRequest(prompts, params, guide, style if is_chat else None, bool(thinks))


def num_prompts_of(fields: GenerationFields) -> int:
    """Count the prompts, before anything is tokenized."""
    if not isinstance(fields, CompletionFields) or isinstance(fields.prompt, str):
        return 1
    return 1 if not fields.prompt or isinstance(fields.prompt[0], int) else len(fields.prompt)


def prompts_of(service: Service, fields: GenerationFields) -> list[Prompt]:
    """Tokenize the prompts, cut where a request asks for it."""
    cut = _cut(service, fields)
    if isinstance(fields, CompletionFields):
        prompts = completion_prompts(service.tokenizer.cut_to(*cut), fields)
    else:
        prompts = [rendered_chat(service, fields, cut)]
    return [truncated(prompt, *cut) for prompt in prompts]


def _cut(service: Service, fields: GenerationFields) -> tuple[int | None, str]:
    """Return how many tokens of a prompt are kept, None for all, and the side where it is cut."""
    most, context = fields.truncate_prompt_tokens, service.engine_config.max_sequence_length
    if most == 0:
        text = "truncate_prompt_tokens=0 leaves nothing of the prompt: give 1 or more, or -1"
        raise ApiError(400, text, "truncate_prompt_tokens")
    if most == -1:  # as many as there is room for
        limit = getattr(fields, "max_completion_tokens", None) or fields.max_tokens or 1
        most = max(1, context - limit)
    return None if most is None or most > context else most, fields.truncation_side


def rendered_chat(
    service: Service, fields: TemplateFields, cut: tuple[int | None, str] = (None, "left")
) -> RenderedChat:
    """Render and tokenize a chat. cut: most tokens, None for any number, and the side to cut."""
    tokenizer = service.tokenizer.cut_to(*cut)
    return chat_prompt(tokenizer, fields, service.config.keeps_changing_lines)


def _params(
    service: Service, fields: GenerationFields, prompts: Sequence[Prompt]
) -> SamplingParams:
    limit, context = fields.max_tokens, service.engine_config.max_sequence_length
    length = max(len(getattr(prompt, "tokens", prompt)) for prompt in prompts)
    if isinstance(fields, ChatFields) and fields.max_completion_tokens is not None:
        limit = fields.max_completion_tokens
    elif limit is None or "max_tokens" not in fields.model_fields_set:
        left = max(1, context - length)  # what there is room for
        limit = left if limit is None else min(left, limit)
    if isinstance(fields, ChatFields) and length + limit > context:
        if not service.config.lowers_max_tokens or length >= context:
            raise fields.too_long(length, limit, context)
        fields.note(f"lowered max_tokens from {limit} to {context - length}")
        limit = context - length
    return sampling_params(service.tokenizer, fields, limit)
