"""Which characters of a rendered conversation are the model's words, those to learn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, takewhile
from typing import Any

from jinja2 import nodes

from megatron_hybrid.text.chat_template import (
    OTHER,
    ChatTemplate,
    Conversation,
    Generation,
    Message,
    common_length,
    with_other_content,
)

TrainOn = str
"""The messages that are trained: "all" of the assistant's, its "last" one, or those of some
`ROLES`, such as "assistant,tool"."""
Answer = tuple[int, int, float]
"""[start, end) of an answer, and the weight of its tokens."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
ROLES = ("system", "developer", "user", "assistant", "tool")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Characters of no text, around the model's words in a rendering that marks them."""
_PIECES = re.compile(r"<[^<>]*>|\s|[^<\s]+|<")
"""Marks, spaces and words. Where two texts begin to differ, a piece begins."""
_THOUGHTS = re.compile(r"(<think>\s*(</think>)?|\[THINK\]|<\|channel>\w*\s*(<channel\|>)?)\s*\Z")
"""The start of thoughts, or empty ones, at the end of a prompt. They belong to the answer."""


def render_with_answers(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    train_on: TrainOn = "all",
    marked: ChatTemplate | None = None,
) -> tuple[str, list[Answer], list[int] | None]:
    """Render a whole conversation, and find the model's answers in it.

    They are the template's `{% generation %}` blocks. A template without any is rendered up to each
    answer and after it. An answer begins after the header of its turn, with its thoughts, and ends
    with what ends its turn. A message with `"train": false`, or `"weight": 0`, is not trained; with
    another `"weight"` it counts so many times. What another role says, if that is trained, begins
    where the template begins to write it.

    Args:
        template: writes the conversation.
        messages: those of `ChatTemplate.render`.
        variables: those of the template, tools among them.
        train_on: see `TrainOn`.
        marked: a template for training, with `{% generation %}` blocks, that writes the same text.

    Returns:
        The text; each answer in it, ascending; and where the words of each answer end, before what
        ends its turn, or None if the template marks the answers.

    Raises:
        ValueError, TypeError: as `ChatTemplate.render`; or no message is to be trained, or the
            place of one cannot be found, or `marked` writes another text.
    """
    conversation = template.conversation(messages, variables)
    answers = _Answers(template, conversation)
    weights = _weights(conversation.messages, train_on)
    marks, words = marked or template, None
    if is_marked(marks):
        found = [(*span, 1.0) for span in _marked_spans(marks, answers)]
        if set(weights.values()) - {1.0} or train_on not in ("all", "last"):
            # A span belongs to the last message that begins before its end.
            said = [i for i, each in enumerate(answers.messages) if each["role"] == "assistant"]
            starts = {answers.first_place(index): weights.get(index, 0.0) for index in said}
            owners = [max((s for s in starts if s < end), default=None) for _, end, _ in found]
            found = [(*each[:2], starts.get(owner, 0.0)) for each, owner in zip(found, owners)]
            others = [index for index, weight in weights.items() if weight and index not in said]
            more = [(*part[:2], weights[i]) for i in others for part in answers.parts(i)]
            found = sorted([*found, *more])
    elif marked is not None:
        raise ValueError(f"{marked.origin} has no {{% generation %}} blocks to mark answers by")
    else:
        said = [index for index, weight in weights.items() if weight]
        parts = [(*part, weights[index]) for index in said for part in answers.parts(index)]
        parts = sorted(part for part in parts if part[0] < part[1])
        found = [(start, end, weight) for start, end, _, weight in parts]
        words = [words_end for _, _, words_end, _ in parts]
    if not (found := [each for each in found if each[0] < each[1] and each[2]]):
        raise ValueError(
            "the conversation has no answer to train: no message of the "
            f"{' or '.join(trained_roles(train_on))}, or all are left out or empty"
        )
    return answers.text, found, words


def text_after(template: ChatTemplate, messages: Sequence[Message], variables: Mapping) -> str:
    """Return what follows the last answer when the conversation goes on, "" if that is unknown."""
    answers = _Answers(template, template.conversation(messages, variables))
    role = "tool" if answers.messages[-1].get("tool_calls") else "user"
    more = [*answers.messages, {"role": role, "content": OTHER}]
    return answers.after(more, len(answers.messages) - 1) or ""


def trained_roles(train_on: TrainOn) -> tuple[str, ...]:
    """Return the roles of messages that may be trained.

    Raises:
        ValueError: `train_on` is not "all", "last", or roles with commas between them.
    """
    roles = ("assistant",) if train_on in ("all", "last") else tuple(train_on.split(","))
    if not set(roles) <= set(ROLES):
        raise ValueError(
            f"train_on is {train_on!r}; it must be 'all' or 'last' (of the assistant), or some of "
            f"{', '.join(ROLES)} with commas between them"
        )
    return roles


def is_marked(template: ChatTemplate) -> bool:
    """Return whether the template has `{% generation %}` around the model's words."""
    written = re.sub(r"\{#.*?#\}", "", template.source, flags=re.DOTALL)
    return re.search(r"\{%[-+]?\s*generation\b", written) is not None


def _weights(messages: Sequence[Message], train_on: TrainOn) -> dict[int, float]:
    """Return the weights of messages of trained roles by index; 0 leaves a message out."""
    roles = trained_roles(train_on)
    weights = {i: 1.0 for i, message in enumerate(messages) if message["role"] in roles}
    if train_on == "last":
        weights.update(dict.fromkeys([*weights][:-1], 0.0))
    for index, message in enumerate(messages):
        for name in {"train", "weight"} & message.keys():
            value = message[name]
            is_number = name == "weight" and isinstance(value, (int, float))
            is_weight = is_number and LEAST_WEIGHT <= value <= MOST_WEIGHT
            if not (value in (0, 1) or is_weight) or (value and index not in weights):
                raise ValueError(
                    f"messages[{index}], of the role {message['role']!r}, has {name}={value!r:.60}"
                    f": true, or a weight of {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, is for messages "
                    f"of {', '.join(roles)} (train_on), else give false"
                )
            if index in weights:
                weights[index] *= value
    return weights


# Templates with marks ----------------------------------------------------------------------------


class _MarkedGeneration(Generation):
    """An extension that renders marks around the body."""

    def around(self, body: list[nodes.Node]) -> list[nodes.Node]:
        before, after = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_OPEN, _CLOSE))
        return [before, *body, after]


_with_marks = lru_cache(maxsize=8)(partial(ChatTemplate, generation=_MarkedGeneration))
"""(source, origin) -> the template that renders marks; compiled ones are kept."""


def _marked_spans(template: ChatTemplate, answers: _Answers) -> list[tuple[int, int]]:
    marking = _with_marks(template.source, template.origin)
    text = marking.run(answers.conversation, answers.messages, False)
    parts = re.split(f"[{_OPEN}{_CLOSE}]", text)
    if (plain := "".join(parts)) != answers.text and template is not answers.template:
        place = common_length(plain, answers.text)
        there, here = (text[place : place + 40] for text in (answers.text, plain))
        raise ValueError(
            f"{template.origin} writes another text than {answers.template.origin}, from character "
            f"{place} on {here!r} in place of {there!r}"
        )
    if plain != answers.text or len(parts) % 2 == 0:
        raise ValueError(
            f"{template.origin} changes the text of its {{% generation %}} blocks afterwards, so "
            "the answers cannot be found: write the blocks out where they are."
        )
    ends = list(accumulate(map(len, parts)))
    return list(zip(ends[:-1:2], ends[1::2]))


# Templates without -------------------------------------------------------------------------------


class _Answers:
    """The answers of one conversation, found by what renderings of its beginnings have in common.

    Some templates write a message differently when the conversation goes on, such as without its
    thoughts. Then only the text between the message and the next one is compared.
    """

    def __init__(self, template: ChatTemplate, conversation: Conversation):
        self.template, self.conversation = template, conversation
        self.messages = conversation.messages
        self.text = template.run(conversation, self.messages, False)
        self._try = partial(template.try_run, conversation)

    def parts(self, index: int) -> list[tuple[int, int, int]]:
        """Return [start, end) of what a message says, and where its words end. An answer has two
        parts where the template writes what tools said between its calls and its content."""
        is_answer = self.messages[index]["role"] == "assistant"
        start = self._start(index) if is_answer else self.first_place(index)
        end = self._end(index)
        if None not in (start, end) and index + 1 < len(self.messages):
            others = self.first_place(index + 1)
            if start <= others < end and self.messages[index + 1]["role"] != "tool":
                end = others
            elif start <= others < end:
                calls_end, content = self._around_tools(index)
                if None not in (calls_end, content) and start <= calls_end <= others < content:
                    return [(start, calls_end, calls_end), (content, end, self.words_end(index))]
                end = None
        if start is None or end is None or start > end:
            raise ValueError(
                f"{self.template.origin} renders messages[{index}] among others, or in another way "
                "when the conversation goes on, so its place cannot be found: mark answers by "
                "{% generation %} in the template, or in one for training (--chat-template)."
            )
        return [(start, end, self.words_end(index))]

    def _around_tools(self, index: int) -> list[int | None]:
        """Return where the calls of an answer end, and where what their tools said ends, if the
        content comes after that."""
        calls = [*self.messages[:index], {**self.messages[index], "content": ""}]
        said = takewhile(lambda message: message["role"] == "tool", self.messages[index + 1 :])
        texts = [self._try(calls), self._try([*calls, *said])]
        return [len(text) if text and self.text.startswith(text) else None for text in texts]

    def first_place(self, index: int) -> int:
        """Return the first place that depends on what a message says, the end if none does."""
        return common_length(self.text, self._other(self.messages, index) or self.text)

    def words_end(self, index: int) -> int:
        """Return where the words of a message end, or 0 if that is unknown."""
        follows = self.after(self.messages, index)
        return 0 if follows is None else len(self.text) - len(follows)

    @cached_property
    def _header(self) -> str:
        """The header of an answer's turn, without an opening of thoughts; "" if there is none."""
        question = [{"role": "user", "content": OTHER}]
        plain, asked = self._try(question, False), self._try(question, True)
        if plain is None or asked is None:
            return ""
        header = asked[_common_pieces(plain, asked) :]
        return header[: m.start()] if (m := _THOUGHTS.search(header)) else header

    def _start(self, index: int) -> int | None:
        before, text = self.messages[:index], self.text
        header = self._header
        if not before:
            place = self.first_place(0)
            return text.rfind(header, 0, place) + len(header) if header in text[:place] else place
        prompt = self._try(before, True)
        if prompt is not None and text.startswith(prompt):
            start = len(prompt)
        else:
            follows = self.after(self.messages, index - 1)
            asked = self.after(before, index - 1, True)
            if follows is None or asked is None:
                return None
            start = len(text) - len(follows) + _common_pieces(follows, asked)
        if thoughts := _THOUGHTS.search(text, max(0, start - 64), start):
            start = thoughts.start()
        # After a tool's answer some templates ask for no header, and write it all the same.
        is_written = header and text.startswith(header, start)
        after = start + len(header)
        return after if is_written and after <= self.first_place(index) else start

    def _end(self, index: int) -> int | None:
        if index == len(self.messages) - 1:
            return len(self.text)
        upto = self.messages[: index + 1]
        whole = self._try(upto)
        if whole is not None and self.text.startswith(whole):
            return len(whole)
        follows, end = self.after(self.messages, index), self.after(upto, index)
        if end is None:  # some templates refuse a conversation without a question
            more = [*self.messages, {"role": "assistant", "content": "."}]
            end = self.after(more, len(self.messages))
        if follows is None or end is None:
            return None
        length = _common_pieces(follows, end)
        header = self._header or follows
        if not length and end and not follows.startswith(header) and follows[:1] in ("<", "["):
            length = _PIECES.match(follows).end()  # the last turn ends by another mark
        return len(self.text) - len(follows) + length

    def after(self, messages: list, index: int, add_generation_prompt: bool = False) -> str | None:
        """Return the text that is written after a message, or None if it is unknown."""
        is_whole = messages is self.messages
        text = self.text if is_whole else self._try(messages, add_generation_prompt)
        other = self._other(messages, index, add_generation_prompt)
        if text is None or other in (None, text):
            return None
        return text[len(text) - common_length(text[::-1], other[::-1]) :]

    def _other(self, messages: list, index: int, add_generation_prompt: bool = False) -> str | None:
        """Return a rendering in which all words of this message differ, or all but its content if
        the template refuses that; None if it refuses both."""
        for with_content in (True, False):
            other = _with_other_words(messages[index], with_content)
            changed = [*messages[:index], other, *messages[index + 1 :]]
            if (text := self._try(changed, add_generation_prompt)) is not None:
                return text
        return None


def _common_pieces(first: str, second: str) -> int:
    """Count the leading characters that two texts share, in whole pieces."""
    if first.startswith(second):
        return len(second)
    end = common_length(first, second) + 64  # in a piece that differs, at most
    pieces = [_PIECES.findall(text[:end]) for text in (first, second)]
    return sum(map(len, pieces[0][: common_length(*pieces)]))


def _with_other_words(message: Mapping[str, Any], with_content: bool) -> dict[str, Any]:
    thoughts = message.keys() & {"reasoning_content", "thinking", "reasoning"}
    other = {**message, **dict.fromkeys(thoughts, OTHER)}
    if with_content:
        other = with_other_content(other)
    if message.get("tool_calls"):
        other["tool_calls"] = [
            {**call, "function": {**function, "arguments": _other_leaves(function["arguments"])}}
            for call in message["tool_calls"]
            for function in [call["function"]]
        ]
    return other


def _other_leaves(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _other_leaves(each) for key, each in value.items()} or {OTHER: OTHER}
    return OTHER
