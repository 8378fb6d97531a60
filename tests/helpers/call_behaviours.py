"""What is a call and what is content, in all dialects: rows for tests and for the docs.

Run it to write docs/reference/tool_calls.md again.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid.serving.parsers.dialect import Dialect

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tool_calls.md"
Calls = list[tuple[str, dict[str, Any]]]
KINDS = ("string", "integer", "number", "boolean", "object", "array")
PARAMETERS = {kind[0]: {"type": kind} for kind in KINDS} | {"i": {"type": ["integer", "null"]}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": given}}}
    for name, given in (("put", PARAMETERS), ("now", {}))
]
SEP = "<｜tool▁sep｜>"  # noqa: RUF001
ALL, ONE = "<｜tool▁calls▁{}｜>", "<｜tool▁call▁{}｜>"  # noqa: RUF001


class Row(NamedTuple):
    dialect: str
    behaviour: str
    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""
    thinks: bool = False
    """The prompt ends inside of reasoning."""


class Way(NamedTuple):
    """How a dialect writes calls."""

    begin: str
    write: Callable[[str, dict[str, Any]], str]
    between: str = ""
    end: str = ""
    each: bool = False
    """The marks are around each call."""
    bare: bool = False
    """Calls begin the answer, without a mark."""

    def __call__(self, calls: Calls) -> str:
        return self.around([self.write(*call) for call in calls])

    def around(self, written: list[str]) -> str:
        """Marks around calls."""
        if self.each:
            return self.between.join(self.begin + one + self.end for one in written)
        return self.begin + self.between.join(written) + self.end


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def json_call(name: str, given: dict) -> str:
    return dumps({"name": name, "arguments": given})


def python_call(name: str, given: dict) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def texts(given: dict) -> Iterator[tuple[str, str]]:
    return ((k, v if isinstance(v, str) else dumps(v)) for k, v in given.items())


def coder_call(name: str, given: dict) -> str:
    tags = (f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts(given))
    return f"\n<function={name}>\n{''.join(tags)}</function>\n"


def glm_call(name: str, given: dict) -> str:
    tags = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts(given))
    return f"{name}\n{''.join(tags)}"


def invoke(name: str, given: dict, space: str = "", flag: str = "") -> str:
    def tag(key: str, text: str) -> str:
        is_text = str(isinstance(given[key], str)).lower()
        begin = f'<{space}parameter name="{key}"{flag.format(is_text)}>'
        return f"{begin}{text}</{space}parameter>\n"

    tags = "".join(tag(*each) for each in texts(given))
    return f'<{space}invoke name="{name}">\n{tags}</{space}invoke>\n'


STEP = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>\n"  # noqa: RUF001


def step_call(name: str, given: dict) -> str:
    return f"{STEP[0]}{invoke(name, given, 'steptml:').strip()}{STEP[1]}"


def cohere_call(name: str, given: dict) -> str:
    return dumps({"tool_call_id": "0", "tool_name": name, "parameters": given})


def gemma_call(quote: str) -> Callable[[str, dict], str]:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{written(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else dumps(value)

    return lambda name, given: f"call:{name}{written(given)}"


def kimi_call(name: str, given: dict) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"{head}{dumps(given)}<|tool_call_end|>"


def v3_call(name: str, given: dict) -> str:
    begin, end = ONE.format("begin"), ONE.format("end")
    return f"{begin}function{SEP}{name}\n```json\n{dumps(given)}\n```{end}"


def v31_call(name: str, given: dict) -> str:
    return f"{ONE.format('begin')}{name}{SEP}{dumps(given)}{ONE.format('end')}"


DSML = "｜DSML｜"  # noqa: RUF001


def dsml_call(name: str, given: dict) -> str:
    return invoke(name, given, DSML, ' string="{}"')


SECTION = ALL.format("begin"), ALL.format("end")
WAYS = {
    "cohere_command4": Way("<|START_ACTION|>[", cohere_call, ", ", "]<|END_ACTION|>"),
    "deepseek_v3": Way(SECTION[0], v3_call, "\n", SECTION[1]),
    "deepseek_v31": Way(SECTION[0], v31_call, "", SECTION[1]),
    "deepseek_v32": Way(f"<{DSML}function_calls>\n", dsml_call, "", f"</{DSML}function_calls>"),
    "deepseek_v4": Way(f"<{DSML}tool_calls>\n", dsml_call, "", f"</{DSML}tool_calls>"),
    "ernie45": Way("<tool_call>\n", json_call, "\n", "\n</tool_call>\n", each=True),
    "functiongemma": Way(
        "<start_function_call>", gemma_call("<escape>"), "", "<end_function_call>", each=True
    ),
    "gemma4": Way("<|tool_call>", gemma_call('<|"|>'), "", "<tool_call|>", each=True),
    "glm45": Way("<tool_call>", glm_call, "\n", "</tool_call>", each=True),
    "granite": Way("<|tool_call|>[", json_call, ", ", "]"),
    "hermes": Way("<tool_call>\n", json_call, "\n", "\n</tool_call>", each=True),
    "hunyuan_a13b": Way("<tool_calls>[", json_call, ", ", "]</tool_calls>"),
    "jamba": Way("<tool_calls>[", json_call, ", ", "]</tool_calls>"),
    "kimi_k2": Way("<|tool_calls_section_begin|>", kimi_call, "", "<|tool_calls_section_end|>"),
    "lfm2": Way("<|tool_call_start|>[", python_call, ", ", "]<|tool_call_end|>"),
    "llama3_json": Way("", json_call, "; ", bare=True),
    "llama4_json": Way("", json_call, "", bare=True),
    "llama4_pythonic": Way("[", python_call, ", ", "]", bare=True),
    "minimax_m1": Way("<tool_calls>\n", json_call, "\n", "\n</tool_calls>"),
    "minimax_m2": Way("<minimax:tool_call>\n", invoke, "", "</minimax:tool_call>"),
    "mistral": Way("[TOOL_CALLS] [", json_call, ", ", "]"),
    "mistral_names": Way("[TOOL_CALLS]", lambda n, g: f"{n}[ARGS]{dumps(g)}", each=True),
    "nemotron_json": Way("<TOOLCALL>[", json_call, ", ", "]</TOOLCALL>"),
    "olmo3": Way("<function_calls>", python_call, "\n", "</function_calls>"),
    "phi4_mini": Way("functools[", json_call, ", ", "]"),
    "pythonic": Way("[", python_call, ", ", "]", bare=True),
    "qwen3_coder": Way("<tool_call>", coder_call, "\n", "</tool_call>", each=True),
    "seed_oss": Way("<seed:tool_call>", coder_call, "\n", "</seed:tool_call>", each=True),
    "step3": Way("<｜tool_calls_begin｜>\n", step_call, "", "<｜tool_calls_end｜>"),  # noqa: RUF001
    "xlam": Way("[", json_call, ", ", "]", bare=True),
}
NOT_READ = {
    "Kimi K3": "its calls are numbered, and parameters typed, in tags",
    "MiniMax M3": "a tag for each parameter, nested as its value is",
}
"""Dialects whose calls are content, of models that do not load here."""
TAGGED = ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "deepseek_v4", "step3")
VALUES = {
    "a text": {"s": "Łódź"},
    "a text of several lines": {"s": "a\n  b\n\nc"},
    "a text with quotes": {"s": 'it\'s "so"'},
    "a text with brackets": {"s": "f(x[0]) }{ ]["},
    "a text with a backslash": {"s": "a\\b \\n c"},
    "a text like a number": {"s": "12"},
    "a text with angle brackets": {"s": "if a < b: a > c"},
    "numbers": {"i": -3, "n": 1.5},
    "null": {"i": None},
    "a boolean": {"b": True},
    "an object": {"o": {"a": {"b": [1, "x"]}}},
    "an empty object and list": {"o": {}, "a": []},
    "several parameters": {"s": "x", "i": 1, "b": False, "a": [1, 2]},
}
PUT, NOW, NONE = ("put", {"s": "x"}), ("now", {}), ("nope", {"s": "x"})


def common_rows() -> Iterator[Row]:
    """The same behaviours of each dialect."""
    for name, way in WAYS.items():
        for behaviour, given in VALUES.items():
            yield Row(name, behaviour, way([("put", given)]), [("put", given)])
        yield Row(name, "no arguments", way([NOW]), [NOW])
        yield Row(name, "two calls", way([PUT, NOW]), [PUT, NOW])
        yield Row(name, "one function twice", way([PUT, PUT]), [PUT, PUT])
        whole = way([NONE])
        yield Row(name, "an unknown function", whole, [], whole)
        for behaviour, calls in (
            ("an unknown function after a right call", [NOW, NONE]),
            ("an unknown function before a right call", [NONE, NOW]),
            ("an unknown function between right calls", [NOW, NONE, NOW]),
        ):
            written = way([NONE]) if way.each else way.write(*NONE)
            yield Row(name, behaviour, way(calls), [NOW] * calls.count(NOW), written)
        if not way.bare:
            yield Row(name, "text before", f"Well.\n{way([PUT])}", [PUT], "Well.")
            cut = way([PUT])[: len(way.begin) + 8]
            yield Row(name, "cut in the arguments", cut, [], cut)
            text = f"Well. {way([PUT]).strip()} Then. {way([NOW]).strip()} End."
            yield Row(name, "text around calls", text, [PUT, NOW], "Well. Then. End.")
            text = way.begin + json_call(*PUT) + way.end
            yield Row(name, "JSON between the marks", text, [PUT])
            alone = f"The mark is {way.begin.strip()} so far."
            yield Row(name, "the mark in a text", alone, [], alone)
            yield Row(
                name, "in a thought without an end", f"Hm.\n{way([PUT])}", [PUT], "", "Hm.", True
            )
            thought = f"Not {way([PUT])} yet."
            text = f"{thought}</think>Done."
            yield Row(name, "in a thought that goes on", text, [], "Done.", thought, True)
            text = f"Hm.</think>{way([PUT])}"
            yield Row(name, "after a thought", text, [PUT], "", "Hm.", True)
        if way.end.strip() and way.end != "]" and not way.bare:
            text = way([PUT]).removesuffix(way.end.lstrip("]\n"))
            yield Row(name, "the end mark is missing", text, [PUT])
            text += way([NOW])
            yield Row(name, "it is missing where the next call begins", text, [PUT, NOW])
            quoted = {"s": f"a {way.end.strip().lstrip(']')} b"}
            yield Row(name, "its end mark in a text", way([("put", quoted)]), [("put", quoted)])


def unreadable(way: Way) -> str:
    """A call of a given function with a parameter twice, or a value that is none."""
    written = way.write("put", {"s": "QQ", "n": 5})
    for name in ("=n>", '"n" ', '"n">', "<arg_key>n<"):
        written = written.replace(name, name.replace("n", "s", 1))
    for quote in ('"', "'", '<|"|>', "<escape>"):
        written = written.replace(f"{quote}QQ{quote}", "[1 2]")
    return written


JSON = json_call(*PUT)
JSON_MISSES: dict[str, tuple[str, int, str]] = {
    "a list": (f"[{JSON}]", 1, ""),
    "a list of two": (f"[{JSON}, {JSON}]", 2, ""),
    "two, a line each": (f"{JSON}\n{JSON}", 2, ""),
    "two, nothing between them": (JSON * 2, 2, ""),
    "two, with a comma": (f"{JSON}, {JSON}", 2, ""),
    "two, with a semicolon": (f"{JSON}; {JSON}", 2, ""),
    "in a fence": (f"\n```json\n{JSON}\n```\n", 1, ""),
    "a list in a fence of no language": (f"```\n[{JSON}]\n```", 1, ""),
    "a list that is open": (f"[{JSON}", 1, ""),
    "a list with a comma at its end": (f"[{JSON},]", 1, ""),
    "arguments as a text of JSON": (JSON.replace('{"s": "x"}', dumps('{"s": "x"}')), 1, ""),
    "parameters for arguments": (JSON.replace("arguments", "parameters"), 1, ""),
    "inside of a function": (f'{{"type": "function", "function": {JSON}}}', 1, ""),
    "an id and a type": (JSON.replace("{", '{"id": "1", "type": "function", ', 1), 1, ""),
    "one of two unreadable": (f'[{{"name": "put", "s": 1}}, {JSON}]', 1, '{"name": "put", "s": 1}'),
    "one of two unknown": (f'[{{"name": "nope"}}, {JSON}]', 1, '{"name": "nope"}'),
}
"""JSON of calls, the number of them and what else is said."""


def misses(name: str, way: Way) -> Iterator[Row]:
    """The near misses that each dialect reads alike."""
    put, now, bad = way.write(*PUT), way.write(*NOW), unreadable(way)
    left = way.begin + bad + way.end if way.each else bad
    whole = way.around([bad])
    yield Row(name, "an unreadable call", whole, [], whole)
    for place, written, calls in (
        ("after a right one", [now, bad], [NOW]),
        ("before a right one", [bad, put], [PUT]),
        ("between right ones", [now, bad, put], [NOW, PUT]),
    ):
        yield Row(name, f"an unreadable call {place}", way.around(written), calls, left)
    if "{}" in now:
        nothing = re.sub(', "(arguments|parameters)": {}', "", now).replace("{}", "")
        given = [("nothing", nothing)]
        if way.write is not WAYS["gemma4"].write and way.write is not WAYS["functiongemma"].write:
            given += [("null", now.replace("{}", "null")), ('""', now.replace("{}", '""'))]
        for what, written in given:
            yield Row(name, f"{what} for no arguments", way.around([written, put]), [NOW, PUT])
    raw = way.write("put", {"s": "a\nb\tc"}).replace("\\n", "\n").replace("\\t", "\t")
    yield Row(name, "raw lines and tabs", way.around([raw]), [("put", {"s": "a\nb\tc"})])
    comma = put
    for close in ('"}', "')", '<|"|>}', "<escape>}"):
        comma = comma.replace(f"x{close}", f"x{close[:-1]}, {close[-1]}")
    yield Row(name, "a comma at the arguments' end", way.around([comma]), [PUT])
    begin, end = ("", "") if way.bare else (way.begin.rstrip("[\n"), way.end.lstrip("]"))
    text = f"{way.begin}\n {put}\n {way.end}"
    if way.bare:
        text = f"\n {text}"
    else:
        yield Row(name, "the begin mark twice", way.begin + way([PUT]), [PUT], way.begin)
        yield Row(
            name, "a call after words in a thought", f"Hm. {way([PUT])}", [PUT], "", "Hm.", True
        )
    yield Row(name, "space around a call", text, [PUT])
    yield Row(name, "text after a call", f"{way([PUT])}\nDone.", [PUT], "Done.")
    for size in range(1, len(end.strip())):
        text = way([PUT])
        yield Row(name, "an end mark that is cut", text[: text.rindex(end.strip()) + size], [PUT])
    cut = way.around([now, put])
    cut = cut[: cut.rindex("put") + 3 + (way.write is python_call)]
    rest = cut[cut.rindex(way.begin if way.each else put[: put.index("put") + 3]) :]
    if name != "glm45":  # whose name alone is a call
        yield Row(name, "a right call, then one that is cut", cut, [NOW], rest)
    for behaviour, (written, count, content) in JSON_MISSES.items():
        text = begin + written + end
        yield Row(name, f"JSON: {behaviour}", text, [PUT] * count, content)


def near_misses() -> Iterator[Row]:
    """What models are known to write, and vLLM's and SGLang's own tests read."""
    yield Row("cohere_command4", "its marks of content", "<|START_TEXT|>Hi.<|END_TEXT|>", [], "Hi.")
    said = "Hm.<|START_TEXT|>Hi.<|END_TEXT|>"
    yield Row("cohere_command4", "content in an open thought", said, [], "Hi.", "Hm.", thinks=True)
    said = "<|START_RESPONSE|>Hi.<|END_RESPONSE|><think>Hm.</think>"
    yield Row("cohere_command4", "a thought after content", said, [], "Hi.", "Hm.")
    step, whole = WAYS["step3"], WAYS["step3"]([PUT])
    for behaviour, text in (
        ("JSON in a call's own marks", step.around([f"{STEP[0]}{JSON}{STEP[1]}"])),
        ("JSON after a mark alone", step.around([f"{STEP[0][:19]}{JSON}{STEP[1]}"])),
        ("lines around the word", whole.replace("function", "\nfunction\n")),
        ("another word", whole.replace("function", " tool ")),
        ("no section", step.write(*PUT)),
    ):
        yield Row("step3", behaviour, text, [PUT])
    for name in ("minimax_m2", "deepseek_v32", "deepseek_v4"):
        yield Row(name, "no marks", WAYS[name].write(*PUT), [PUT])
    for behaviour, written, given in (
        ("a text of several lines in single quotes", "s='a\nb'", {"s": "a\nb"}),
        ("a set", "a={'a', 'b'}", {"a": ["a", "b"]}),
        ("a tuple", "a=('a', 'b')", {"a": ["a", "b"]}),
        ("three quotes", 's="""a\nb"""', {"s": "a\nb"}),
        ("joined texts", "s='a' 'b'", {"s": "ab"}),
        ("a raw text", r"s=r'\d+'", {"s": r"\d+"}),
        ("an unknown escape", r"s='\d+'", {"s": r"\d+"}),
        ("underscores in a number", "i=1_000", {"i": 1000}),
        ("a zero before a number", "i=07", {"i": 7}),
        ("a sign before a number", "i=+7", {"i": 7}),
        ("a text with its own quotes", "s='sed -n '1,5p' f'", {"s": "sed -n '1,5p' f"}),
        ("an apostrophe", "s='it's'", {"s": "it's"}),
        ("JSON's words", "b=true, i=null", {"b": True, "i": None}),
        ("a comma at the end", "a=[1, 2,],", {"a": [1, 2]}),
        ("an escape of a letter", r"s='\u0141'", {"s": "Ł"}),
    ):
        for name in ("lfm2", "olmo3", "pythonic"):
            text = WAYS[name].around([f"put({written})"])
            if name == "pythonic" and behaviour == "an apostrophe":
                continue  # where its list ends cannot be told from the answer's end
            yield Row(name, behaviour, text, [("put", given)])
    for behaviour, arguments in (
        ("an argument without a name", "1"),
        ("a name for a value", "s=x"),
        ("a call for a value", "s=f()"),
        ("an argument twice", "s='a', s='b'"),
        ("more than a literal", "i=1+1"),
        ("a template", "s=f'{x}'"),
    ):
        text = WAYS["lfm2"].around([f"put({arguments})"])
        yield Row("lfm2", behaviour, text, [], text)
    coder = "<function=put>\n<parameter=s>\nx\n</parameter>\n</function>\n"
    yield Row("qwen3_coder", "no begin mark", f"Well.\n{coder}</tool_call>", [PUT], "Well.")
    yield Row("qwen3_coder", "no marks", coder, [PUT])
    for behaviour, tag in (
        ("a parameter's end is missing", "</parameter>\n"),
        ("the function's end is missing", "</function>\n"),
    ):
        text = f"<tool_call>\n{coder.replace(tag, '')}</tool_call>"
        yield Row("qwen3_coder", behaviour, text, [PUT])
        yield Row("qwen3_coder", f"{behaviour}, of two calls", text * 2, [PUT, PUT])
    for behaviour, key, written, given in (
        ("an empty integer that may be null", "i", "", {"i": None}),
        ("an empty number", "n", "", {}),
        ("an empty text", "s", "", {"s": ""}),
        ("None for an object", "o", "None", {"o": None}),
        ("Python's object", "o", "{'a': None}", {"o": {"a": None}}),
        ("Python's list", "a", "['x', True]", {"a": ["x", True]}),
        ("Python's True", "b", "True", {"b": True}),
    ):
        for name in TAGGED:
            text = WAYS[name]([("put", {key: written})])
            yield Row(name, behaviour, text, [("put", given)])
    kimi = WAYS["kimi_k2"]([PUT])
    for behaviour, text in (
        ("an id without functions.", kimi.replace("functions.", "")),
        ("an id without a number", kimi.replace(":0", "")),
        ("an id with a name alone", kimi.replace("functions.put:0", "put")),
        ("no section", kimi.replace("<|tool_calls_section_begin|>", "")),
        ("lines between marks", kimi.replace("|><|", "|>\n<|")),
        ("space around names", kimi.replace("functions.put:0", " functions.put:0 ")),
        ("an end is missing where a call begins", kimi * 2),
    ):
        text = text.replace("<|tool_call_end|><|tool_calls_section_end|><", "<")
        yield Row("kimi_k2", behaviour, text, [PUT] * text.count("put"))
    for name in ("deepseek_v3", "deepseek_v31"):
        text = WAYS[name]([PUT, NOW]).replace(ONE.format("end"), "", 1)
        yield Row(name, "an end is missing where a call begins", text, [PUT, NOW])
    for behaviour, text in (
        ("no [ARGS]", '[TOOL_CALLS]put{"s": "x"}'),
        ("space around the name", '[TOOL_CALLS] put [ARGS] {"s": "x"}'),
        ("an id", '[TOOL_CALLS]put[CALL_ID]abc123def[ARGS]{"s": "x"}'),
    ):
        text = text.replace("put [ARGS]", "put[ARGS]")
        yield Row("mistral", behaviour, text, [PUT])
    text = "[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]"
    yield Row("mistral", "nothing for arguments", text, [NOW, NOW])
    for behaviour, name, old, new in (
        ("space around names", "qwen3_coder", "=put>", "= put >"),
        ("quotes around names", "qwen3_coder", "=put>", '="put">'),
        ("single quotes around names", "minimax_m2", '"', "'"),
        ("no quotes around names", "minimax_m2", '"', ""),
        ("space around names", "glm45", "<arg_key>s<", "<arg_key> s <"),
        ("a colon before it", "gemma4", "call:put", ":call:put"),
        ("all on one line", "glm45", "\n", ""),
    ):
        yield Row(name, behaviour, WAYS[name]([PUT]).replace(old, new), [PUT])
    text = f"Well.<|python_start|>[{python_call(*PUT)}]<|python_end|>"
    yield Row("llama4_pythonic", "marks", text, [PUT], "Well.")
    text = f"Here is it: {JSON} Would you like more?"
    for name in ("llama3_json", "llama4_json"):
        content = "Here is it: Would you like more?"
        yield Row(name, "a call in a text", text, [PUT], content)
    for name, quote in (("gemma4", '<|"|>'), ("functiongemma", "<escape>")):
        given = {"s": "a b: {c}"}
        text = WAYS[name]([("put", given)]).replace(quote, '"')
        yield Row(name, "quotes of JSON", text, [("put", given)])
    for behaviour, inside in (
        ("JSON that is cut", '{"name": "put", "arguments": {"s": '),
        ("no JSON", "put(x)"),
        ("a name twice", '{"name": "put", "arguments": {"s": "a", "s": "b"}}'),
        ("NaN", '{"name": "put", "arguments": {"n": NaN}}'),
        ("arguments that are no object", '{"name": "put", "arguments": [1]}'),
        ("a name that is no text", '{"name": 1, "arguments": {}}'),
        ("other members", '{"name": "put", "s": "x"}'),
    ):
        text = f"<tool_call>{inside}</tool_call>"
        yield Row("hermes", behaviour, text, [], text)
        yield Row(
            "hermes", f"{behaviour}, then a right call", text + WAYS["hermes"]([PUT]), [PUT], text
        )
    head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    yield Row("openai", "a call", f'{head.format("put")}{{"s": "x"}}<|call|>', [PUT])
    yield Row("openai", "no arguments", f"{head.format('now')}<|call|>", [NOW])
    yield Row(
        "openai", "no functions.", f"{head.format('now').replace('functions.', '')}{{}}", [NOW]
    )
    yield Row("openai", "the end mark is missing", f'{head.format("put")}{{"s": "x"}}', [PUT])
    text = f"{head.format('nope')}{{}}"
    yield Row("openai", "an unknown function", text, [], text)
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + head.format("now") + "{}"
    yield Row("openai", "after a thought", text, [NOW], "", "Hm.")
    for text in ("The marks are <|start|>, <|message|> and <|end|>.", "It is <|start|>, then"):
        yield Row("openai", "its marks in a text", text, [], text)
    text = "Use <think> for it."
    yield Row("hermes", "the thought's mark in a text", text, [], text)
    repeated = f"<think>\nHm.</think>{WAYS['hermes']([PUT])}"
    yield Row("hermes", "the thought's mark again", repeated, [PUT], "", "Hm.", True)


ROWS = [*common_rows(), *near_misses()]
MISSES = [row for name, way in WAYS.items() for row in misses(name, way)]


def page() -> str:
    """The table as a page."""
    rules = re.split("\n- ", inspect.getdoc(Dialect).replace("\n  ", " "))[1:]
    lines = [
        "# Calls that are read",
        "",
        "What is a call, and what content, in all dialects:",
        "",
        "| rule |",
        "| --- |",
        *(f"| {each.replace(chr(60), chr(38) + 'lt;')} |" for each in rules),
        "",
        "## Near misses",
        "",
        "Each is a test of each dialect named.",
        "",
    ]
    lines += ["| near miss | dialects | for instance |", "| --- | --- | --- |"]
    for behaviour in dict.fromkeys(row.behaviour for row in MISSES):
        rows = [row for row in MISSES if row.behaviour == behaviour]
        names = list(dict.fromkeys(row.dialect for row in rows))
        shown = "all" if len(names) == len(WAYS) else ", ".join(names)
        lines.append(f"| {code(behaviour)} | {shown} | {code(rows[0].text)} |")
    lines += [
        "",
        "## Not read",
        "",
        "| family, which does not load here | what the shared readers do not know |",
        "| --- | --- |",
        *(f"| {name} | {why} |" for name, why in NOT_READ.items()),
        "",
        "## By dialect",
        "",
        "Each row is a test of a text, whole and in letters, and what it is.",
        "`put` and `now` are given functions. `serve --tool-call-parser` names the dialects.",
        "",
    ]
    lines += ["| dialect | written | text | calls | else |", "| --- | --- | --- | --- | --- |"]
    for row in ROWS:
        calls = " ".join(f"{name} {dumps(given)}" for name, given in row.calls)
        rest = f"thought {row.reasoning}; {row.content}" if row.reasoning else row.content
        cells = (row.dialect, row.behaviour, code(row.text), code(calls), code(rest))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """In a cell of a table."""
    text = (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    )
    # Brackets would be read as links, and braces as attributes.
    for sign in "{}[]`":
        text = text.replace(sign, f"&#{ord(sign)};")
    return f"<code>{text}</code>".replace("\n", "⏎") if text else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
