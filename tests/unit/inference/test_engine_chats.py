"""Chats as prompts: the messages are rendered, and states are kept where other chats will fork."""

import re

import pytest
import tokenizers
from differential import LogitsRecorder, check_answer
from reference import VOCAB_SIZE, finish, greedy, tiny_engine, tiny_model
from scripted import ByteTokenizer
from settled import settled
from tokenizers import decoders, models, pre_tokenizers

from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.inference.requests.builder import RenderedChat
from megatron_hybrid.text.chat_template import ChatTemplate
from megatron_hybrid.text.tokenizer import Tokenizer

MODEL = tiny_model()
CHATML = (
    "{% for m in messages %}<{{ m.role + '\n' + m.content }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{%", "assistant\n(thinks){%")
"""Asks for thoughts, which it does not write into the history."""


def letters(template=CHATML):
    """A token for each character, and a chat template."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95}
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    templates = {} if template is None else {"default": ChatTemplate(template)}
    return Tokenizer(tokenizer, chat_templates=templates)


def message(content, role="user"):
    return {"role": role, "content": content}


SYSTEM = message("You answer in riddles, as an old sphinx would.", "system")
EXAMPLES = [message("What is it?"), message("A dog that is no dog.", "assistant")]
COUNT = 6


def ask(engine, messages):
    """Answers a chat, compares all logits with forward passes without a cache."""
    recorder = LogitsRecorder(engine)
    request = engine.add_request(messages, greedy(COUNT, ignore_termination=True))
    finish(engine, request)
    recorder.check(engine.model)
    check_answer(engine.model, request)
    return request.result()


def test_a_chat_is_the_prompt_that_its_template_writes_rendered_before_or_not():
    tokenizer = letters()
    chat = [SYSTEM, *EXAMPLES, message("And now?")]
    rendered = RenderedChat(*tokenizer.chat_prompt(chat))
    engine = tiny_engine(MODEL, tokenizer)
    (one,) = engine.generate(chat, greedy(COUNT))
    rows = engine.generate([chat, tokenizer.render_chat(chat)], greedy(COUNT))
    (event,) = [event for event in engine.stream(chat, greedy(COUNT)) if event.result]
    whole, parts = (engine.add_request(prompt, greedy(COUNT)) for prompt in (chat, rendered))
    assert whole.message_starts == parts.message_starts != ()
    finish(engine)
    tokens = tokenizer.apply_chat_template(chat)
    for result in (one, *rows, event.result, whole.result(), parts.result()):
        assert result.prompt_tokens == tokens
        assert result.token_ids == one.token_ids
    assert engine.explain(chat).match.skipped_tokens == len(tokens)
    assert str(engine.explain(rendered)) == str(engine.explain(chat))


def test_a_second_chat_skips_the_system_prompt_and_an_edit_all_before_it():
    engine, tokenizer = tiny_engine(MODEL, letters()), letters()
    settled(engine.cache)
    first = [SYSTEM, *EXAMPLES, message("How long is a year on the moon of a moon?")]
    ask(engine, first)
    start = len(tokenizer.render_chat([SYSTEM], False))
    kinds = {p.position: p.kind for p in engine.explain(first).positions}
    assert kinds[start] == Kind.MESSAGE
    other = ask(engine, [SYSTEM, message("Who?")])
    assert other.prefix.skipped_tokens == start
    edited = ask(engine, [*first[:-1], message("Never mind. What walks?")])
    before = tokenizer.render_chat(first[:-1], False) + "<user\n"
    assert edited.prefix.skipped_tokens == len(before)


def test_the_next_turn_of_a_template_that_drops_thoughts_resumes_where_they_began():
    engine, tokenizer = tiny_engine(MODEL, letters(THINKING)), letters(THINKING)
    chat = [SYSTEM, message("How long is a year?")]
    result = ask(engine, chat)
    asked = len(tokenizer.render_chat(chat)) - len("(thinks)")
    turn = [*chat, message("one orbit", "assistant"), message("Of what, and around what?")]
    assert ask(engine, turn).prefix.skipped_tokens == asked
    assert len(result.prompt_tokens) == asked + len("(thinks)")


def test_a_turn_that_starts_right_behind_an_answer_saves_no_second_state_there():
    engine, tokenizer = tiny_engine(MODEL, letters()), letters()
    chat = [SYSTEM, message("How long is a year?")]
    answer = ask(engine, chat).text
    turn = [*chat, message(answer, "assistant"), message("Around what?")]
    answered = len(tokenizer.render_chat(chat)) + COUNT
    assert ask(engine, turn).prefix.skipped_tokens == answered
    start = len(tokenizer.render_chat(turn[:-1], False))
    assert start == answered + 2
    assert start not in {p.position for p in engine.explain(turn).positions}


NO_ROLE, RAISES = {"content": "Hello"}, "{{ raise_exception('roles must alternate') }}"
REFUSED = {
    TypeError: [
        (None, [SYSTEM], "chat needs a tokenizer.*pass token ids"),
        (
            ByteTokenizer(),
            [SYSTEM],
            r"chat_prompt\(\), and ByteTokenizer has none.*load_pretrained",
        ),
        (letters(), SYSTEM, "of token ids or of messages, got dict"),
        (letters(), [SYSTEM, "Hi"], "message 1 of the chat is of type str"),
    ],
    ValueError: [
        (letters(None), [SYSTEM], "no chat template.*Send text or tokens"),
        (letters(), [SYSTEM, NO_ROLE], "message 1 .* has the role None"),
        (letters(), [message(None)], "message 0 .* has no content"),
        (letters(RAISES), [SYSTEM], "cannot render these messages: roles must alternate"),
        (
            letters(),
            [message("a" * 2000)],
            "the prompt has 20.. tokens, max_sequence_length is 1024",
        ),
    ],
}
"""Error -> a tokenizer, messages, and what it must name."""


@pytest.mark.parametrize(
    ("error", "tokenizer", "messages", "text"),
    [(error, *row) for error, rows in REFUSED.items() for row in rows],
)
def test_a_chat_that_cannot_be_served_is_refused_at_the_door(error, tokenizer, messages, text):
    engine = tiny_engine(MODEL, tokenizer)
    for ask_for in (engine.add_request, engine.stream):
        with pytest.raises(error) as caught:
            ask_for(messages)
        assert re.search(text, str(caught.value), re.DOTALL), str(caught.value)
    assert not engine.has_work
