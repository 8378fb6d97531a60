"""A template of a request writes what it would in this process, and ends nothing else."""

import pytest

from megatron_hybrid.text.chat_template import ChatTemplate, TextLimit, TextTooLongError
from megatron_hybrid.text.request_template import RequestTemplate

CHAT = [{"role": "user", "content": "a\n漢"}, {"role": "assistant", "content": "b"}]
LINES = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}{{ shout }}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"


@pytest.mark.parametrize("source", [LINES, "{{", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"])
def test_it_writes_and_refuses_as_in_this_process(source):
    told = []
    for kind in (ChatTemplate, RequestTemplate):
        template = kind(source, "the field")
        try:
            whole = template.render(CHAT, False, shout="!")
            told.append((whole, template.fork_points(CHAT), template.takes_parts("user")))
        except ValueError as error:
            told.append(str(error))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x * 2 %}{% endfor %}",
        pytest.param(NESTED.replace("x", ""), marks=pytest.mark.matrix),  # it takes its 3 s
    ],
)
def test_what_takes_too_much_is_refused_and_the_next_is_rendered(source):
    with pytest.raises(ValueError, match="the field cannot render these messages"):
        RequestTemplate(source, "the field").render(CHAT)
    assert RequestTemplate(LINES).render(CHAT) == "<user:a\n漢><assistant:b>"


def test_it_is_cut_while_it_writes():
    with pytest.raises(TextTooLongError, match="more than 900 characters") as error:
        RequestTemplate(NESTED, "the field", TextLimit(100, 900)).render(CHAT)
    assert (error.value.num_tokens, error.value.max_tokens) == (101, 100)
