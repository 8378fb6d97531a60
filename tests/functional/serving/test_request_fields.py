"""Each field of OpenAI, vLLM and SGLang is used, or refused by name: docs/guides/http_api.md."""

import asyncio
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import httpx
import jsonschema
import pytest
from extreme_sampling import over_http
from http_server import demo_service, set_config
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import ValidationError

from docs_tools.reference import escaped, expand
from megatron_hybrid.inference.async_stream import AsyncStream
from megatron_hybrid.serving import admission, app
from megatron_hybrid.serving.app import create_app, rename_error_fields
from megatron_hybrid.serving.http.errors import ApiError, refusal_of_field
from megatron_hybrid.serving.parsers.choice import REASONING_PARSERS
from megatron_hybrid.serving.parsers.dialect import ReasoningFormat
from megatron_hybrid.serving.protocols import fields, request_mapping, responses
from megatron_hybrid.serving.protocols.messages import MessageFields
from megatron_hybrid.serving.routes import OF_EACH_REPLICA

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE = "/v1/messages"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Once upon"}], "max_tokens": 2},
    COMPLETION: {"prompt": "Once upon", "max_tokens": 2},
    RESPONSE: {"input": "Once upon", "max_output_tokens": 2},
}
ROUTES = pytest.mark.parametrize("route", BODIES)


class Caller:
    """Calls routes of the demo model's server, in this process."""

    def __init__(self):
        self.service = demo_service()
        self._runner = asyncio.Runner()
        self._app = create_app(self.service)

    def __call__(self, route, body=None, method="POST", content=None, **given):
        async def call():
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                content_type = {"Content-Type": "application/json"}
                headers = content_type | given.pop("headers", {})
                text = json.dumps(body) if content is None else content
                return await client.request(
                    method, route, content=text if method == "POST" else None, headers=headers
                )

        return self._runner.run(call())

    def generated(self, route, **more):
        """The answer to a body with more fields."""
        answer = self(route, {**BODIES[route], **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, route, **more):
        """The error of a body with more fields."""
        answer = self(route, {**BODIES.get(route, BODIES[CHAT]), **more})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def close(self):
        self._runner.run(self.service.close())
        self._runner.close()


def test_extreme_values_are_refused_or_used_and_change_no_other_answer():
    """Draws are those of a naive model; a row of NaN fails its own request."""
    counts = Counter()
    asyncio.run(over_http(16, counts))
    assert counts["HTTP 200"] and counts["HTTP 400"] and counts["HTTP 500"]


@pytest.fixture(scope="module")
def call():
    caller = Caller()
    yield caller
    caller.close()


def shown(call, content="Once upon", **more):
    messages = [{"role": "user", "content": content}]
    found = call(f"{CHAT}/render", {"messages": messages, **more})
    assert found.status_code == 200, found.text
    return call("/detokenize", {"tokens": found.json()["token_ids"]}).json()["prompt"]


@pytest.fixture
def set_template(call):
    """Sets the server's chat template."""
    before = call.service.tokenizer.chat_template
    yield call.service.tokenizer.set_chat_template
    call.service.tokenizer.set_chat_template(before)


def test_texts_of_a_content_list_are_joined_where_the_template_wants_text(call, set_template):
    parts = [{"type": "text", "text": text} for text in ("Hi", "there")]
    assert shown(call, parts) == shown(call, "Hi\nthere") == "Hi\nthere\n"
    loop = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    set_template(loop)
    assert shown(call, parts) == "<Hi><there>"


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}{{ shout }}"
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


def test_a_template_has_variables_and_may_begin_in_reasoning(call, set_template):
    assert "reasoning" not in call.generated(CHAT)["choices"][0]["message"]
    set_template(TEMPLATE)
    given = {"chat_template_kwargs": {"shout": "!"}, "tools": [FUNCTION]}
    for route in ("/tokenize", f"{CHAT}/render"):
        found = call(route, {**BODIES[CHAT], **given}).json()
        tokens = found.get("tokens") or found["token_ids"]
        text = call("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert text == "<user:Once upon>![f]<think>"
    given = {"temperature": 0}
    whole = call.generated(CHAT, **given)
    (found,) = whole["choices"]
    assert found["message"]["reasoning"] and not found["message"]["content"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    *_, last = streamed(call, CHAT, **given, stream_options={"include_usage": True})
    counts = ("completion_tokens", "completion_tokens_details")
    assert all(last["usage"][name] == whole["usage"][name] for name in counts)
    assert call.generated(RESPONSE, **given)["output"][0]["type"] == "reasoning"


def test_a_field_of_another_route_may_ask_for_nothing_or_the_same(call):
    call.generated(COMPLETION, tools=[], parallel_tool_calls=True, max_completion_tokens=None)
    call.generated(RESPONSE, max_tokens=2, max_completion_tokens=2)


@pytest.mark.parametrize("budget", [0, 3])
def test_reasoning_ends_after_so_many_tokens(call, set_template, monkeypatch, budget):
    start, end = " maid", " clothes"  # a token each
    monkeypatch.setitem(REASONING_PARSERS, "maids", ReasoningFormat(start, end))
    set_config(monkeypatch, call, reasoning_parser="maids")
    set_template("{{ messages[0].content }}" + start)
    given = {"temperature": 0}
    more = {"max_tokens": 5, "return_token_ids": True, "n": 2, "bad_words": ["clothes"]}
    ids = call("/tokenize", {"prompt": end, "add_special_tokens": False}).json()["tokens"]
    plain = call.generated(CHAT, **given, **more)["choices"][0]["token_ids"]
    found = call.generated(CHAT, **given, **more, thinking_token_budget=budget)["choices"]
    for choice in found:
        assert choice["token_ids"][: budget + 1] == plain[:budget] + ids
        assert bool(choice["message"].get("reasoning")) == (budget > 0)
        assert choice["message"]["content"]
    if budget == 0:
        return
    asked = {**given, **more, "thinking_token_budget": budget}
    again = call.generated(COMPLETION, prompt="Once upon" + start, **asked)["choices"]
    assert [each["token_ids"] for each in again] == [each["token_ids"] for each in found]
    assert "one by one" in call(COMPLETION, {**asked, "prompt": [start, "Once"]}).text
    items = call.generated(RESPONSE, **given, max_output_tokens=5, thinking_token_budget=budget)
    assert items["output"][-1]["type"] == "message"
    free = call.generated(CHAT, **given, **more, thinking_token_budget=-1)["choices"][0]
    assert free["token_ids"] == plain
    guided = {"structured_outputs": {"choice": ["yes"]}, "thinking_token_budget": budget}
    (choice,) = call.generated(CHAT, **given, **guided, max_tokens=12)["choices"]
    assert choice["message"]["content"] == "yes"
    assert choice["message"]["reasoning"]  # the guide begins behind it
    asked = {**given, **guided, "prompt": "Once upon" + start, "max_tokens": 12}
    assert call.generated(COMPLETION, **asked)["choices"][0]["text"].endswith(end + "yes")
    none = {"properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": none}}]
    forced = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    forced["thinking_token_budget"] = budget
    (choice,) = call.generated(CHAT, **given, **forced, max_tokens=80)["choices"]
    assert choice["message"]["reasoning"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["f"]


@pytest.mark.parametrize(
    "part", [5, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": 5}, {}]
)
def test_other_parts_of_a_content_list_are_refused(call, part):
    error = call.refused(CHAT, messages=[{"role": "user", "content": [part]}])
    assert error["param"] == "messages" and "message 0" in error["message"]
    assert call.refused(RESPONSE, input=[{"role": "user", "content": [part]}])["param"] == "input"


def test_items_of_a_response_may_have_refusals(call):
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    counts = [
        call.generated(RESPONSE, input=[item])["usage"]["input_tokens"]
        for item in (refusal, {"role": "assistant", "content": "No."})
    ]
    assert counts[0] == counts[1]


KINDS = {
    CHAT: fields.ChatFields,
    COMPLETION: fields.CompletionFields,
    RESPONSE: responses.ResponseFields,
    MESSAGE: MessageFields,
    "/tokenize": fields.TokenizeFields,
    "/detokenize": fields.DetokenizeFields,
    "/cache/explain": fields.ExplainFields,
    "/abort": fields.AbortFields,
}
VALUES = (
    *(True, False, 0, 1, 1.0, -1, 5.5, "5", "true", [], {}, [False], ["5"], [5.0], [5.5]),
    *([[False]], [[5.5]], {"5": "5"}, None),
)


@pytest.mark.parametrize("route", KINDS)
def test_a_field_takes_the_types_that_the_description_declares_and_no_others(call, route):
    kind, other = KINDS[route], {"tokens": [5], "request_id": "x"}
    body = BODIES[CHAT] if route == MESSAGE else BODIES.get(route, other)
    described = call("/openapi.json", method="GET").json()
    declared = described["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    schema = described["components"]["schemas"][declared["schema"]["$ref"].split("/")[-1]]
    assert kind.model_fields.keys() | kind.refused().keys() <= schema["properties"].keys()
    for name, types in schema["properties"].items():
        is_declared = jsonschema.Draft202012Validator(
            {**types, "components": described["components"]}
        ).is_valid
        for value in VALUES:
            try:
                read = kind.model_validate({**body, name: value})
                if route in (RESPONSE, MESSAGE):
                    read.check()
                    with rename_error_fields(read):
                        read = read.to_chat()
                read.check()
                errors = []
            except ValidationError as error:
                errors = [refusal_of_field(error.errors())]
            except ApiError as error:
                errors = [error]
            if not is_declared(value):
                assert [error.param for error in errors] == [name], (name, value)
            elif errors:  # of others
                assert name in str(errors[0]) and errors[0].param in MEANINGS, (name, value)


MEANINGS = {
    *("stream_options", "prompt_logprobs", "tool_choice", "continue_final_message", "top_logprobs")
}
"""Fields that are refused for what others say."""


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (fields.CompletionFields, {"prompt": [True] * 1000}),
        (fields.CompletionFields, {"prompt": [[True] * 1000] * 1000}),
        (fields.CompletionFields, {"prompt": "a", "logit_bias": {str(n): "" for n in range(1000)}}),
        (fields.ChatFields, {"messages": [1] * 1000}),
        (responses.ResponseFields, {"input": "a", "tools": [{}] * 1000}),
        (fields.CompletionFields, {"prompt": "a", "structured_outputs": {"choice": [1] * 1000}}),
    ],
)
def test_many_wrong_values_have_few_errors(kind, body):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 7


def test_an_unknown_name_is_told_in_short():
    with pytest.raises(ValidationError) as caught:
        fields.CompletionFields.model_validate({"structured_outputs": {"a\n" * 1000: 1}})
    refusal = str(refusal_of_field(caught.value.errors()))
    assert refusal.startswith(r"structured_outputs: 'a\na") and "\n" not in refusal
    assert refusal.endswith("... is unknown: leave it out") and len(refusal) < 300


def test_a_refusal_says_which_methods_and_spans_there_are(call):
    answer = call(CHAT, method="PUT")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    for path, told in (("/flush_cache", "POST to /cache/reset"), ("/sleep", "--take-weights")):
        answer = call(path)
        assert answer.status_code == 404 and told in answer.json()["error"]["message"]
    for span in ("0", "x", ""):
        answer = call(f"/cache/history?seconds={span}", method="GET")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "seconds"), error


@ROUTES
def test_a_seed_is_any_int64(call, route):
    for seed in (-(1 << 63), -1, (1 << 63) - 1):
        call.generated(route, seed=seed)


@ROUTES
@pytest.mark.parametrize("body", ["", "[]", '"a"'])
def test_a_body_that_is_no_object_is_refused_in_words(call, route, body):
    answer = call(route, content=body)
    assert answer.status_code == 400 and "the body: send a JSON object, with the" in answer.text


@ROUTES
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("[NaN]", "expected value"),
        ("[" * 300, "lists and objects are over 200 deep"),
        ("9" * 5000, "an integer has more than 4300 digits"),
    ],
)
def test_what_python_cannot_hold_in_any_field_is_refused_in_words(call, route, value, why):
    body = json.dumps(BODIES[route])[:-1] + f', "colour": {value}}}'
    answer = call(route, content=body)
    assert answer.status_code == 400 and f"the body cannot be read as JSON: {why}" in answer.text
    if value.isdigit():  # JSON in a text is read by Python
        outputs = {"json": f'{{"const": {value}}}'}
        error = call.refused(route, structured_outputs=outputs)
        text = "structured_outputs.json: bad JSON schema: Exceeds the limit (4300 digits) for "
        assert error["message"].startswith(text) and "sys." not in error["message"]


LABELS = (
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store", "user"),
)
"""Fields that say something about a request, and nothing about its answer."""


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (fields.CompletionFields, completion_create_params.CompletionCreateParamsBase),
        (fields.ChatFields, chat_create_params.CompletionCreateParamsBase),
        (responses.ResponseFields, response_create_params.ResponseCreateParamsBase),
    ],
)
def test_openai_s_fields_are_used_refused_or_labels(kind, given):
    used, refused = {*kind.model_fields, *LABELS, "stream_options"}, {*kind.refused()}
    assert {*given.__annotations__} - used - refused == set()
    assert used & refused == set()


FORMS = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}
NOT_HELD = {"type": "json_schema", "schema": {"not": {}}}
LARGE = {"type": "json_schema", "json_schema": {"schema": {"title": "a" * (256 << 10)}}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
ARRAY = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
GUIDES = ({"structural_tag": {}}, {"json": ""}, {"choice": []}, {"regex": ""}, {"colour": "red"})
SOURCES = ('rot ::= "x"', 'root ::= "x', 'root ::= "x"{1,100000}', f'root ::= "x" #{"y" * 70_000}')
GRAMMARS = [{"grammar": source} for source in SOURCES]
OF_ALL_ROUTES = [
    *(("thinking_token_budget", budget) for budget in (5, -2, 0.6)),  # there is no reasoning
    *(("structured_outputs", wanted) for wanted in GUIDES),
    *(("bad_words", words) for words in ([""], ["a"] * 65)),
    *(("allowed_token_ids", wanted) for wanted in ([], [10**6])),  # nothing is not all
    ("top_k", -2),
    ("num_speculative_tokens", -1),
    ("seed", 1 << 64),
]


@pytest.mark.parametrize(
    ("route", "more", "param", "text"),
    [
        (COMPLETION, {"prompt": [1] * 2000}, "prompt", "--context is 1024"),
        (CHAT, {"chat_template": "x"}, "chat_template", "--chat-template"),
        (CHAT, {"max_tokens": 5000}, "max_tokens", "--context=1024"),
        (CHAT, {"max_completion_tokens": 5000}, "max_completion_tokens", "--context=1024"),
        (RESPONSE, {"max_output_tokens": 5000}, "max_output_tokens", "5000 in the completion"),
        (RESPONSE, {"input": "long " * 2000}, "input", "--context"),
        (RESPONSE, {"text": {"format": NOT_HELD}}, "text", ""),
        (RESPONSE, {"top_k": "many"}, "top_k", ""),
        (RESPONSE, {"text": {"format": {"type": "xml"}}}, "text", ""),
        (RESPONSE, {"previous_response_id": "resp_1"}, "previous_response_id", ""),
        (RESPONSE, {"input": []}, "input", ""),
        (RESPONSE, {"input": [{"type": "item_reference", "id": "1"}]}, "input", ""),
        (RESPONSE, {"input": [{"type": "reasoning", "summary": []}]}, "input", "reasoning alone"),
        (RESPONSE, {"tools": [{"type": "other"}]}, "tools", ""),
        (RESPONSE, FORMS, "text", "text and structured_outputs.regex both say"),
        (CHAT, {"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", ""),
        (CHAT, {"n": 99}, "n", "--max-requests=8"),
        (COMPLETION, {"stop": ["a", ""]}, "stop", "at least 1 character"),
        (CHAT, {"stop": ["a"] * 65}, "stop", "at most"),
        (CHAT, {"stop": "a" * 1025}, "stop", "at most"),
        (CHAT, {"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most"),
        (CHAT, {"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "at most"),
        (CHAT, {"tools": [FUNCTION] * 129}, "tools", "at most"),
        (CHAT, {"response_format": LARGE}, "response_format", "and may have"),
        (COMPLETION, {"stop_token_ids": [10**6]}, "stop_token_ids", ""),
        (COMPLETION, {"logit_bias": {10**6: 1}}, "logit_bias", ""),
        (COMPLETION, {"prompt": [10**6]}, "prompt", ""),
        (COMPLETION, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        (COMPLETION, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ""),
        (COMPLETION, {"cache_breakpoints": [1] * 9999}, "cache_breakpoints", "at most 4096"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema is"),
        (CHAT, {"tools": [ARRAY], "tool_choice": "required"}, "tool_choice", "use 'object'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools", ""),
        (CHAT, {"tool_choice": "required"}, "tool_choice", ""),
        (CHAT, {"fallbacks": ["other"]}, "fallbacks", "leave it out"),
        (MESSAGE, {"instructions": "x"}, "instructions", "leave it out"),
        (COMPLETION, {"cache_salt": "a\0b"}, "cache_salt", "is 'a\\x00b': leave"),
        (CHAT, {"best_of": 3}, "best_of", "use n"),
        (COMPLETION, {"guided_json": {}}, "guided_json", "use structured_outputs, with one of"),
        (COMPLETION, {"max_completion_tokens": 5}, "max_completion_tokens", "use max_tokens"),
        (RESPONSE, {"max_new_tokens": 5}, "max_new_tokens", "use max_output_tokens"),
        (RESPONSE, {"max_tokens": 3}, "max_tokens", ""),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", ""),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
        *((route, {name: v}, name, "") for name, v in OF_ALL_ROUTES for route in BODIES),
        *(
            (route, {"chat_template_kwargs": {name: []}}, "chat_template_kwargs", "")
            for name in ("messages", "tools", "add_generation_prompt")
            for route in (CHAT, RESPONSE, "/tokenize")
        ),
        *(
            (COMPLETION, {"structured_outputs": wanted}, "structured_outputs", "grammar")
            for wanted in GRAMMARS
        ),
    ],
)
def test_an_error_names_the_field_and_flag_that_the_caller_used(call, route, more, param, text):
    error = call.refused(route, **more)
    assert error["param"] == param and text in error["message"], error


@pytest.mark.parametrize("begun", ["", "Well."])
def test_a_guide_that_becomes_too_complex_is_refused_however_late(call, begun):
    text = {"type": "string", "pattern": "^a{1,50}b"}
    many = {"anyOf": [{"type": "object", "properties": {f"p{i}": text}} for i in range(250)]}
    parts = [{"type": "const_string", "value": begun}] if begun else []
    parts.append({"type": "json_schema", "json_schema": many})
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    given = {**BODIES[CHAT], "response_format": form, "max_tokens": 9}
    whole, stream = call(CHAT, given), call(CHAT, {**given, "stream": True})
    assert (whole.status_code, stream.status_code) == (400, 200 if begun else 400)
    error = whole.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert "too complex to go on" in error["message"] and whole.text in stream.text


def test_the_drawn_token_is_among_those_of_completions_log_probs(call):
    found = call.generated(
        COMPLETION, logprobs=1, temperature=2.0, seed=1, max_tokens=30, ignore_eos=True
    )
    given = found["choices"][0]["logprobs"]
    rows = list(zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True))
    assert all(top[token] == value for token, value, top in rows)
    assert {len(top) for *_, top in rows} == {1, 2}


@pytest.mark.parametrize("logprobs", [None, 1])
def test_log_probs_of_the_prompt_are_those_of_an_echo(call, logprobs):
    more = {} if logprobs is None else {"logprobs": logprobs}
    found = call.generated(COMPLETION, echo=True, prompt_logprobs=2, return_token_ids=True, **more)[
        "choices"
    ][0]
    echoed = call.generated(COMPLETION, echo=True, logprobs=2)["choices"][0]["logprobs"]
    scores, tokens = found["prompt_logprobs"], found["prompt_token_ids"]
    assert len(scores) == len(tokens) and scores[0] is None
    rows = zip(scores, tokens, echoed["token_logprobs"], echoed["top_logprobs"])
    for row, token, value, top in list(rows)[1:]:
        assert row[str(token)]["logprob"] == value
        likely = sorted((each for each in row.values() if each["rank"]), key=lambda e: e["rank"])
        assert [each["rank"] for each in likely] == [1, 2] and len(row) <= 3
        assert all(top[each["decoded_token"]] == each["logprob"] for each in likely)
    if logprobs is None:
        assert found["logprobs"] is None
    else:
        assert {len(top) for top in found["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert "prompt_logprobs" not in call.generated(COMPLETION)["choices"][0]


def test_a_chat_has_log_probs_of_its_prompt(call):
    found = call.generated(CHAT, prompt_logprobs=0, n=2)
    first, *others = found["prompt_logprobs"]
    assert first is None and {len(row) for row in others} == {1}
    assert len(others) == found["usage"]["prompt_tokens"] - 1
    assert found["choices"][0]["logprobs"] is None
    for route, more in ((CHAT, {"stream": True}), (RESPONSE, {}), (COMPLETION, {"stream": True})):
        assert call.refused(route, prompt_logprobs=1, **more)["param"] == "prompt_logprobs"


def test_tokens_may_be_named_by_their_ids(call):
    found = call.generated(
        CHAT, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True
    )["choices"][0]
    names = [entry["token"] for entry in found["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in found["token_ids"]]


@pytest.mark.parametrize("route", ["/health", "/live", "/version", "/v1/models", "/metrics", "/"])
def test_head_is_answered_as_get(call, route):
    head, get = call(route, method="HEAD"), call(route, method="GET")
    assert head.status_code == get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"]


def test_an_invocation_is_a_chat_or_a_completion(call):
    for route in (CHAT, COMPLETION):
        given = BODIES[route] | {"temperature": 0}
        own, other = call(route, given).json(), call("/invocations", given).json()
        assert own["choices"] == other["choices"] and own["object"] == other["object"]
        refused = call("/invocations", {**given, "temperature": "x"}).json()["error"]
        assert refused["param"] == "temperature"
    for nothing in ({}, []):
        assert call("/invocations", nothing).status_code == 400


def test_the_tokenizer_is_described_as_in_its_file(call):
    found = call("/tokenizer_info", method="GET").json()
    assert found["chat_template"] == call.service.tokenizer.chat_template
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    (end,) = (
        token
        for token, about in found["added_tokens_decoder"].items()
        if about["content"] == found["eos_token"] and about["special"] is True
    )
    text = {"prompt": found["eos_token"], "add_special_tokens": False}
    assert call("/tokenize", text).json()["tokens"] == [int(end)]


def test_a_completion_without_a_limit_takes_what_the_context_has_left(call):
    context = call.service.engine_config.max_sequence_length
    for left, limit in ((30, 16), (1, 1)):
        body = {"prompt": [[5], [5] * (context - left)], "ignore_eos": True}
        for given, found in ((body, limit), ({**body, "max_tokens": None}, left)):
            assert call(COMPLETION, given).json()["usage"]["completion_tokens"] == 2 * found
    for wrong in ({"prompt": [5] * context}, {**body, "max_tokens": 2}):
        assert call(COMPLETION, wrong).json()["error"]["code"] == "context_length_exceeded"


def test_a_request_id_is_a_label_and_no_lock(call):
    admitted = call.service.admission.admitted
    with admitted("same", "alice") as alice, admitted("same", "bob"):
        call.generated(CHAT, request_id="same")
        assert call(CHAT, BODIES[CHAT], headers={"X-Request-Id": "same"}).status_code == 200
        assert not alice.is_aborted
        assert call("/abort", {"request_id": "same"}).json() == {"aborted": False}


def test_each_field_is_described():
    kinds = [fields.Fields]
    for kind in kinds:
        kinds += kind.__subclasses__()
    all_fields = {(k.__name__, n): field for k in kinds for n, field in k.model_fields.items()}
    assert len(all_fields) > 150
    assert [name for name, field in all_fields.items() if not field.description] == []
    properties = fields.ChatFields.model_json_schema()["properties"]
    assert [name for name, schema in properties.items() if not schema.get("description")] == []


def test_the_description_of_each_field_is_that_of_the_docs(call):
    """`/docs` and docs/reference/http.md show one text, of a trainer's routes, too."""
    with mock.patch.object(
        call.service, "config", replace(call.service.config, takes_weights=True)
    ):
        described = create_app(call.service).openapi()
    page = expand(Path("docs/reference/http.md").read_text(encoding="utf-8"))
    operations = [each for path in described["paths"].values() for each in path.values()]
    bodies = {
        each["requestBody"]["content"]["application/json"]["schema"].get("$ref")
        for each in operations
        if "requestBody" in each
    }
    names = {body.rpartition("/")[2] for body in bodies if body} | {"ResponseFormat", "Function"}
    assert {"ChatFields", "MessageFields", "UpdateFields"} < names
    for name in names:
        for field, schema in described["components"]["schemas"][name]["properties"].items():
            about = " ".join(schema["description"].split())
            if about != "It is not supported.":
                assert f"| `{field}` |" in page and f"| {escaped(about)} |" in page, (name, field)
    parameters = [each for operation in operations for each in operation.get("parameters", ())]
    undescribed = {each["name"] for each in parameters if not each.get("description")}
    assert len(parameters) > 5 and undescribed == set()


def test_the_description_of_the_api_is_true(call):
    """Of each route: a good request and a bad one have a status, a content type and a body of
    those that /openapi.json declares."""
    described = call("/openapi.json", method="GET").json()
    prompt, tokens = {"prompt": "Once"}, {"tokens": [5]}
    bodies = {
        **BODIES,
        **{"/tokenize": prompt, "/detokenize": tokens, "/cache/explain": prompt},
        **{f"{CHAT}/render": BODIES[CHAT], f"{COMPLETION}/render": prompt},
        **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), BODIES[CHAT]),
        "/abort": {"request_id": "x"},
        "/invocations": prompt,
    }
    bad = [{}, {"prompt": 5, "tokens": "x", "messages": 5, "input": 5, "model": "other"}]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            given = [bodies.get(path, {}), *bad] if method == "post" else [None]
            for body in given:
                answer = call(path.replace("{name}", "demo"), body, method.upper())
                answers = operation["responses"]
                declared = answers.get(str(answer.status_code), answers["default"])["content"]
                kind = answer.headers["content-type"].split(";")[0]
                if kind == "application/json":
                    schema = {**declared[kind]["schema"], "components": described["components"]}
                    jsonschema.validate(answer.json(), schema)
                assert kind in declared, (path, kind)
            assert given[0] is None or call(path, given[0]).status_code in (200, 409), path
            if given[0] is not None and path not in (*OF_EACH_REPLICA, "/ping"):
                assert call(path, {**given[0], "model": "other"}).status_code == 404, path
    stream = call(CHAT, {**BODIES[CHAT], "stream": True})
    kind = stream.headers["content-type"].split(";")[0]
    assert kind in described["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert described["paths"][CHAT]["post"]["security"] and "422" not in json.dumps(described)


def streamed(call, route, **more):
    """The chunks of a stream."""
    answer = call(route, {**BODIES[route], "stream": True, **more})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


GREEDY = {"temperature": 0, "max_tokens": 8}


def test_the_stop_reason_is_the_string_or_token_that_ended_an_answer(call):
    (plain,) = call.generated(COMPLETION, return_token_ids=True, **GREEDY)["choices"]
    (empty,) = call.generated(COMPLETION, return_token_ids=True, stop="", **GREEDY)["choices"]
    assert plain["stop_reason"] is None and empty == plain
    token, word = plain["token_ids"][3], plain["text"][4:7]
    for more, reason in (({"stop_token_ids": [token]}, token), ({"stop": [word, "~"]}, word)):
        (found,) = call.generated(COMPLETION, **GREEDY, **more)["choices"]
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", reason)
        assert reason == token or found["text"] == plain["text"][: plain["text"].index(word)]
        last = streamed(call, COMPLETION, **GREEDY, **more)[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


def test_each_chunk_may_have_the_usage_so_far(call):
    options = {"continuous_usage_stats": True}
    for route in (COMPLETION, CHAT):
        *chunks, last = streamed(call, route, stream_options=options, **GREEDY)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 8
        assert chunks[0]["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
        assert chunks[-1]["usage"] == last["usage"]
        *chunks, last = streamed(call, route, stream_options={"include_usage": True}, **GREEDY)
        assert {chunk["usage"] for chunk in chunks} == {None} and last["usage"]
        for none in ({}, {**options, "include_usage": False}):
            chunks = streamed(call, route, stream_options=none, **GREEDY)
            assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
def test_a_stream_has_the_ids_of_a_whole_answer(call, route):
    given = {"return_token_ids": True, **GREEDY}
    whole, chunks = call.generated(route, **given), streamed(call, route, **given)
    places = [each if route == CHAT else each["choices"][0] for each in (whole, *chunks)]
    prompts = [place.get("prompt_token_ids") for place in places]
    assert prompts[0] and prompts == [prompts[0], prompts[0], *[None] * (len(chunks) - 1)]
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("effort", "kwargs", "written"),
    [("none", {}, "False"), ("low", {}, "True"), ("none", {"enable_thinking": True}, "True")],
)
def test_an_effort_says_whether_there_is_reasoning(call, set_template, effort, kwargs, written):
    set_template("{{ enable_thinking }}")
    assert shown(call, chat_template_kwargs=kwargs, reasoning_effort=effort) == written


def test_a_prompt_is_cut_to_its_last_tokens(call):
    tokens = call("/tokenize", {"prompt": "Once upon a time there was"}).json()["tokens"]
    for route, prompt in ((COMPLETION, {"prompt": tokens}), (CHAT, {})):
        found = call.generated(
            route, **prompt, truncate_prompt_tokens=2, return_token_ids=True, max_tokens=1
        )
        assert found["usage"]["prompt_tokens"] == 2
        if prompt:
            assert found["choices"][0]["prompt_token_ids"] == tokens[-2:]
    given = {"prompt": tokens, "truncate_prompt_tokens": 3, "truncation_side": "right"}
    (found,) = call.generated(COMPLETION, **given, return_token_ids=True)["choices"]
    assert found["prompt_token_ids"] == tokens[:3]
    assert call.generated(CHAT, truncate_prompt_tokens=2, truncation_side="right")
    long = call.generated(COMPLETION, prompt=[5] * 3000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 1024 - 2
    text = "Once upon a time there was a king. " * 5000
    messages = [{"role": "user", "content": text}]
    for route, prompt in ((COMPLETION, {"prompt": text}), (CHAT, {"messages": messages})):
        for side in ("left", "right"):
            given = {"truncate_prompt_tokens": 90, "truncation_side": side, "max_tokens": 1}
            found = call.generated(route, **prompt, **given)
            assert found["usage"]["prompt_tokens"] == 90
        assert call.refused(route, **prompt)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_once_the_engine_has_it(call, monkeypatch, stream):
    """While it is prepared, the engine does not stall."""
    monkeypatch.setattr(admission, "STALL_SECONDS", 0)
    found = []

    def note(owner, name):
        function = getattr(owner, name)

        def noted(*given, **more):
            found.append(call.service.admission.stall is not None)
            return function(*given, **more)

        monkeypatch.setattr(owner, name, noted)

    note(app, "prepare")
    note(*((AsyncStream, "begun") if stream else (call.service.engine, "generate")))
    assert call(COMPLETION, {**BODIES[COMPLETION], "stream": stream}).status_code == 200
    assert found == [False, True]


def test_a_stream_echoes_the_prompt(call):
    (whole,) = call.generated(COMPLETION, echo=True, **GREEDY)["choices"]
    chunks = streamed(call, COMPLETION, echo=True, **GREEDY)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert whole["text"].startswith("Once upon")
    assert call.refused(COMPLETION, echo=True, stream=True, logprobs=1)["param"] == "echo"


def test_a_chat_echoes_the_message_that_it_goes_on_with(call):
    said = {"role": "assistant", "content": "Once upon"}
    given = {"messages": [{"role": "user", "content": "?"}, said], "echo": True, **GREEDY}
    given |= {"continue_final_message": True, "add_generation_prompt": False}
    (whole,) = call.generated(CHAT, **given)["choices"]
    assert whole["message"]["content"].startswith("Once upon")
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(call, CHAT, **given)]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == whole["message"]["content"]
    (plain,) = call.generated(CHAT, echo=True, **GREEDY)["choices"]
    assert not plain["message"]["content"].startswith("Once upon")


@ROUTES
def test_only_allowed_tokens_are_drawn(call, route):
    given = {"allowed_token_ids": [7, 300], "ignore_eos": True, "temperature": 100.0}
    more = {} if route == RESPONSE else {"max_tokens": 20, "return_token_ids": True}
    found = call.generated(route, **given, **more)
    if more:
        assert {*found["choices"][0]["token_ids"]} == {7, 300}
    refused = call.refused(route, **given, structured_outputs={"regex": "a"})
    assert refused["param"] == "allowed_token_ids"


@ROUTES
def test_bad_words_are_not_written(call, route):
    limit = "max_output_tokens" if route == RESPONSE else "max_tokens"
    given = {"temperature": 0, limit: 8}

    def text(**more):
        found = call.generated(route, **given, **more)
        if route == RESPONSE:
            return found["output"][0]["content"][0]["text"]
        choice = found["choices"][0]
        return choice["text"] if route == COMPLETION else choice["message"]["content"]

    words = re.findall(r"(?<= )\w+", text())
    others = text(bad_words=words[:2])
    assert not {*words[:2]} & {*re.findall(r"\w+", others)}
    assert text(bad_words=[f"  {word}" for word in words[:2]]) == others
    assert call.refused(route, bad_words=["a"], structured_outputs={"regex": "a"})["param"] == (
        "bad_words"
    )


@ROUTES
def test_a_request_says_how_many_drafts_it_wants(call, route):
    """It reaches the engine; what it does there, tests of the engine show."""
    for most in (0, 2, None):
        fields_ = KINDS[route].model_validate({**BODIES[route], "num_speculative_tokens": most})
        fields_ = fields_.to_chat() if route == RESPONSE else fields_
        params = request_mapping.sampling_params(call.service.tokenizer, fields_, 5)
        assert params.num_speculative_tokens == most


def test_special_tokens_are_in_the_text_if_wanted(call):
    end = call.service.tokenizer.eod
    given = {"logit_bias": {end: 100}, "ignore_eos": True, "temperature": 0, "logprobs": 0}
    more = {"skip_special_tokens": False}
    for shown, mark in (({}, ""), (more, "<|endoftext|>")):
        (found,) = call.generated(COMPLETION, **given, **shown)["choices"]
        assert found["text"] == 2 * mark
        assert found["logprobs"]["text_offset"] == [0, len(mark)]
        chunks = [chunk["choices"][0] for chunk in streamed(call, COMPLETION, **given, **shown)]
        assert "".join(chunk["text"] for chunk in chunks) == 2 * mark
    assert call("/detokenize", {"tokens": [end], **more}).json()["prompt"] == mark
    stopped = call.generated(COMPLETION, logit_bias={end: 100}, temperature=0, **more)["choices"]
    assert (stopped[0]["text"], stopped[0]["finish_reason"]) == ("", "stop")


def test_there_is_always_a_token_to_draw_if_only_one_that_stops(call):
    end = call.service.tokenizer.eod
    (found,) = call.generated(COMPLETION, allowed_token_ids=[end])["choices"]
    assert (found["text"], found["finish_reason"]) == ("", "stop")
    (token,) = call("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    for allowed, more in ((token, {"bad_words": ["a"]}), (end, {"min_tokens": 1})):
        wrong = call.refused(COMPLETION, allowed_token_ids=[allowed], **more)
        assert wrong["param"] == "allowed_token_ids"


def test_a_forced_call_that_is_cut_is_no_content(call):
    given = {"tools": [FUNCTION], "tool_choice": "required", "max_tokens": 1}
    (found,) = call.generated(CHAT, **given)["choices"]
    assert found["message"]["content"] == "" and "tool_calls" not in found["message"]
    *_, last = streamed(call, CHAT, **given)
    for choice in (found, last["choices"][0]):
        assert choice["finish_reason"] == "length"
        assert not choice.get("delta")


def test_messages_are_chats_in_another_form(call):
    """The same prompt, the same cache, the same answer; its errors are Anthropic's."""
    route, system = "/v1/messages", "Tell old tales."
    asked = [{"role": "user", "content": "Once upon a time there was"}]
    chat = {"messages": [{"role": "system", "content": system}, *asked], "max_tokens": 6}
    same = {"temperature": 0}
    body = {"system": system, "messages": asked, "max_tokens": 6, **same}
    expected = call.generated(CHAT, **chat, **same)
    message = call(route, body).json()
    (block,) = message["content"]
    assert block["text"] == expected["choices"][0]["message"]["content"]
    assert message["stop_reason"] == "max_tokens"
    usage, theirs = message["usage"], expected["usage"]
    read = usage["cache_read_input_tokens"]
    assert read == theirs["prompt_tokens"] and usage["input_tokens"] == 0
    counted = call(f"{route}/count_tokens", {"system": system, "messages": asked})
    assert counted.json() == {"input_tokens": theirs["prompt_tokens"]}
    events = call(route, {**body, "stream": True}).text.split("\n\n")
    kinds = [event.partition("\n")[0].removeprefix("event: ") for event in events if event]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    turn = [*asked, {"role": "assistant", "content": message["content"]}, *asked]
    assert call(route, {**body, "messages": turn}).json()["usage"]["cache_read_input_tokens"] > read
    for name, wrong, status in (("max_tokens", 0, 400), ("model", "other", 404)):
        answer = call(route, {**body, name: wrong})
        error = answer.json()
        assert (error["type"], error["error"]["param"]) == ("error", name)
        assert answer.status_code == status


@pytest.mark.parametrize("route", [CHAT, COMPLETION, RESPONSE])
def test_an_answer_keeps_to_a_structural_tag(call, route):
    tag = {"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"}
    form = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag], "at_least_one": True}
    given = {"type": "structural_tag", "format": {**form, "stop_after_first": True}}
    wishes = [{"structured_outputs": {"structural_tag": json.dumps(given)}}]
    more = {"max_output_tokens": 30} if route == RESPONSE else {"max_tokens": 30}
    if route == RESPONSE:
        wishes.append({"text": {"format": given}})
    else:
        wishes.append({"response_format": given})
    for wish in wishes:
        text = json.dumps(call.generated(route, **wish, **more))
        assert re.search("<a>[0-9]{2}</a>", text), text
        (name,) = wish
        broken = json.loads(json.dumps(wish).replace("stop_after_first", "colour"))
        assert call.refused(route, **broken)["param"] == name


def test_an_answer_keeps_to_a_grammar(call):
    source = 'root ::= "SELECT " name ("," name)* ";"\nname ::= [a-c]'
    assert call.generated(CHAT, structured_outputs={"json": {}})["choices"]  # any JSON
    given = {"structured_outputs": {"grammar": source}, "max_tokens": 60, "seed": 1}
    (found,) = call.generated(CHAT, **given)["choices"]
    whole = re.fullmatch(r"SELECT [a-c](,[a-c])*;", found["message"]["content"])
    assert whole or found["finish_reason"] == "length"
    assert found["message"]["content"].startswith("SELECT ")
