"""/v1/responses as the `openai` package sees it."""

from dataclasses import replace

from http_server import DEMO
from model_answers import CALL, REPORT, output_of, result_of, said_in

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.choice import style_of
from megatron_hybrid.serving.protocols.answers import Answer
from megatron_hybrid.serving.protocols.responses import ResponseAnswer, ResponseFields
from megatron_hybrid.text.tokenizer import Tokenizer

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def respond(client, **fields):
    given = {"input": "Once upon a time there was", "max_output_tokens": 12, "temperature": 0}
    return client.responses.create(model="demo", **{**given, **fields})


def test_a_response_says_what_a_chat_says(client):
    found = respond(client)
    messages = [{"role": "user", "content": "Once upon a time there was"}]
    chat = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=12, temperature=0
    )
    assert found.output_text == chat.choices[0].message.content != ""
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 12
    again = respond(client).usage
    assert again.input_tokens_details.cached_tokens == again.input_tokens


def test_a_stream_builds_the_same_response(client):
    whole, text, numbers = respond(client), "", []
    for event in respond(client, stream=True):
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert numbers == list(range(len(numbers)))
    assert text == whole.output_text
    assert event.type == "response.incomplete" and event.response.output_text == text
    stop = {"extra_body": {"stop": " "}}
    with client.responses.stream(model="demo", input="Once upon a time", **stop) as stream:
        assert stream.get_final_response().status == "completed"


def test_texts_have_the_log_probs_of_a_chat(client):
    messages = [{"role": "user", "content": "Once upon a time there was"}]
    given = {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0}
    expected = client.chat.completions.create(logprobs=True, top_logprobs=2, **given)
    for asked in ({"include": ["message.output_text.logprobs"]}, {}):
        (item,) = respond(client, top_logprobs=2, **asked).output
        entries = [entry.model_dump() for entry in item.content[0].logprobs]
        assert entries == [entry.model_dump() for entry in expected.choices[0].logprobs.content]
    assert respond(client).output[0].content[0].logprobs == []


TOKENIZER = Tokenizer.from_folder(DEMO)
STYLE = style_of("<think>")


def answer_to(fields):
    chat = Answer(TOKENIZER, fields.to_chat(), "resp_1", "demo", STYLE)
    return ResponseAnswer(chat, fields)


def answer():
    fields = ResponseFields(input="?", tools=[TOOL])
    return answer_to(fields)


def test_calls_and_reasoning_are_items_of_their_own():
    text = f"<think>well</think>Let me see.\n{CALL}"
    whole = answer().whole([result_of(text, "stop")])
    reasoning, message, call = whole["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "well")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert (call["type"], call["name"], whole["status"]) == (
        "function_call",
        "weather",
        "completed",
    )
    growing = answer()
    events = []
    for letter in text:
        events += said_in(growing.add(output_of(letter)))
    events += said_in(growing.add(output_of("", "stop"))) + growing.last([REPORT], 2)
    final = events[-1]["response"]
    for items in (final["output"], whole["output"]):
        items[2]["call_id"] = "any"
    assert final["output"] == whole["output"] and final["usage"] == whole["usage"]
    details = whole["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": len(TOKENIZER.tokenize("well"))}
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    assert kinds.count("function_call_arguments.done") == 1


def test_log_probs_belong_to_the_text_in_which_their_token_begins():
    """Not to reasoning, marks or calls; in whole and token by token."""
    fields = ResponseFields(input="?", tools=[TOOL], include=["message.output_text.logprobs"])
    text = f"<think>Łódź is wet</think>Łódź is wet, żółw.\n{CALL}"
    result, growing = result_of(text, "stop"), answer_to(fields)
    result.token_ids = TOKENIZER.tokenize(text, add_special_tokens=False)
    result.log_probs = [-float(place) for place in range(len(result.token_ids))]
    _, message, _ = answer_to(fields).whole([result])["output"]
    entries = message["content"][0]["logprobs"]
    said = bytes(byte for entry in entries for byte in entry["bytes"])
    assert said.startswith("Łódź is wet, żółw.".encode()) and b"tool" not in said
    first = round(-entries[0]["logprob"])
    before = TOKENIZER.detokenize(result.token_ids[:first], skip_special_tokens=False)
    assert before == "<think>Łódź is wet</think>"
    events, shown = [], ""
    for number, token in enumerate(result.token_ids, 1):
        now = TOKENIZER.detokenize(result.token_ids[:number], skip_special_tokens=False)
        now = now.rstrip("\ufffd")
        output = output_of(now[len(shown) :], "stop" if now == text else None)
        events += said_in(growing.add(replace(output, token_ids=[token], log_probs=[1.0 - number])))
        shown = now
    given = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in given for entry in event["logprobs"]] == entries
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == entries


def test_reasoning_comes_back_by_its_encrypted_content():
    """A client without stored state sends the items of an answer again: they are one message, as
    the model wrote it."""
    include = ["reasoning.encrypted_content"]
    fields = ResponseFields(input="?", tools=[TOOL], include=include)
    whole = answer_to(fields).whole(
        [result_of(f"<think>well, ż</think>Let me see.\n{CALL}{CALL}", "stop")]
    )
    items = whole["output"]
    encoded = items[0]["encrypted_content"]
    result = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "rain"}
    for reasoning in (items[0], {"type": "reasoning", "id": "1", "encrypted_content": encoded}):
        given = [{"role": "user", "content": "?"}, reasoning, *items[1:], result]
        user, said, tool = ResponseFields(input=given).to_chat().messages
        assert (user["role"], said["role"], tool["role"]) == ("user", "assistant", "tool")
        assert (said["reasoning"], said["content"]) == ("well, ż", "Let me see.")
        assert [call["id"] for call in said["tool_calls"]] == [i["call_id"] for i in items[2:]]
    for wrong in ("gAAAAABk", "mh1.#", "mh1./w==", 5):
        other = {"type": "reasoning", "encrypted_content": wrong}
        chat = ResponseFields(input=[other, {"role": "user", "content": "?"}]).to_chat()
        assert len(chat.messages) == 1 and "encrypted" in chat.changes[0]
    plain = ResponseFields(
        input=[{"type": "reasoning", "summary": []}, {"role": "user", "content": "?"}]
    )
    assert [message["role"] for message in plain.to_chat().messages] == ["user"]
    assert (
        "encrypted_content"
        not in answer().whole([result_of("<think>a</think>b", "stop")])["output"][0]
    )


def test_an_error_in_a_stream_is_an_event():
    event = answer().error(ApiError(500, "it broke"))
    assert (event["type"], event["message"]) == ("error", "it broke")
    assert answer().encode(event).startswith(b"event: error\ndata: {")
