"""The chat templates of all dialects: rendered as transformers does, forks where turns part."""

import json

import pytest
import transformers
from dialects import NAMES, TOKENS, message_of, template
from http_server import DEMO
from model_answers import TOOLS

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.protocols.fields import ChatFields
from megatron_hybrid.serving.protocols.request_mapping import chat_prompt
from megatron_hybrid.text.chat_template import common_length
from megatron_hybrid.text.tokenizer import Tokenizer

SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Zebras?"}
CITY = ("weather", {"city": "Łódź <1>", "days": 3})
TOOL = {"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": "Qrain"}
SO, WHY = {"role": "assistant", "content": "So"}, {"role": "user", "content": "Why"}


@pytest.fixture(scope="module")
def tokenizers():
    found = {name: Tokenizer.from_folder(DEMO) for name in NAMES}
    for name, tokenizer in found.items():
        tokenizer.set_chat_template(template(name))
    return found


@pytest.fixture(scope="module")
def theirs():
    file = str(DEMO / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=file, **TOKENS)


def sent(name):
    """A conversation as clients send it: arguments are texts."""
    call = message_of(name, [CITY], reasoning="hmm")
    for each in call["tool_calls"]:
        each["function"]["arguments"] = json.dumps(CITY[1], ensure_ascii=False)
    return [SYSTEM, USER, call, TOOL]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_with_calls_is_rendered_as_by_transformers(tokenizers, theirs, name):
    given = [*sent(name)[:2], message_of(name, [CITY]), TOOL]
    given[2] |= {"thinking": "hmm", "reasoning_content": "hmm"}
    theirs.chat_template = template(name)
    expected = theirs.apply_chat_template(
        given, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    messages = sent(name)
    fields = ChatFields(messages=messages, tools=TOOLS, chat_template_kwargs=TOKENS)
    assert tokenizers[name].detokenize(chat_prompt(tokenizers[name], fields).tokens) == expected
    assert "Łódź <1>" in expected and "Qrain" in expected
    keeps = name in ("hermes", "mistral_names", "openai", "minimax_m2")
    assert ("hmm" in expected) == keeps  # that of the running turn


@pytest.mark.parametrize("name", NAMES)
def test_forks_lie_where_other_conversations_part(tokenizers, name):
    call = message_of(name, [CITY], reasoning="hmm")
    for turn in ([SYSTEM, USER], [USER], [SYSTEM, USER, call, TOOL], [SYSTEM, USER, SO, USER]):
        ids, forks = tokenizers[name].chat_prompt(turn, tools=TOOLS)
        thought = {**SO, "reasoning": "well"}
        others = [
            [*turn[:-1], {**turn[-1], "content": "What else"}],
            *([*turn, said, WHY] for said in (SO, thought)),
            [*turn, call, TOOL],
            [*turn, call, TOOL, SO, WHY],
            [SYSTEM, {"role": "user", "content": "Who"}],
        ]
        for other in others if turn[0] is SYSTEM else others[:-1]:
            common = common_length(ids, tokenizers[name].chat_prompt(other, tools=TOOLS)[0])
            nearest = max((f for f in (*forks, len(ids)) if f <= common), default=0)
            # This tokenizer has no token <think>, which would part from <TOOLCALL> before the "<".
            assert common - nearest <= (name in ("nemotron_json", "minimax_m2")), other


@pytest.mark.parametrize("name", NAMES)
def test_a_developer_is_the_system_where_the_template_knows_no_other(tokenizers, name):
    tokens = []
    for role in ("system", "developer"):
        fields = ChatFields(messages=[{"role": role, "content": "Be kind."}, USER])
        tokens.append(list(chat_prompt(tokenizers[name], fields).tokens))
    assert tokens[0] == tokens[1]
    both = [SYSTEM, {"role": "developer", "content": "Be brief."}, USER]
    text = tokenizers[name].detokenize(
        chat_prompt(tokenizers[name], ChatFields(messages=both)).tokens
    )
    if name in ("openai", "gemma4", "functiongemma"):  # which know it
        assert "Be kind.\n\nBe brief." not in text
    else:
        assert "Be kind.\n\nBe brief." in text


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", "{'city': 1}", 5, "[" * 99999])
def test_broken_arguments_in_history_name_their_call(tokenizers, arguments):
    call = message_of("hermes", [CITY, CITY])
    call["tool_calls"][1]["function"]["arguments"] = arguments
    with pytest.raises(ApiError, match="call 1 of message 1 of the chat, of 'weather'") as raised:
        chat_prompt(tokenizers["hermes"], ChatFields(messages=[USER, call]))
    assert (raised.value.status, raised.value.param) == (400, "messages")
