"""Dialects that write each parameter between tags, as it is.

Qwen3-Coder, also Qwen3.5 and Nemotron 3: chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16; ByteDance-Seed/Seed-OSS-36B-Instruct. MiniMax M2:
https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md. GLM 4.5 to 4.7:
chat templates of zai-org/GLM-4.5, zai-org/GLM-4.6 and zai-org/GLM-4.7. Step 3: stepfun-ai/step3.
DeepSeek V3.2: encoding/README.md of deepseek-ai/DeepSeek-V3.2; V4 has another mark around calls.
"""

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_hybrid.serving.parsers.dialect import (
    Dialect,
    Json,
    Pieces,
    ToolCall,
    Tools,
    json_calls,
    optional,
    repeated,
    sequence,
)
from megatron_hybrid.serving.parsers.schemas import Schema

_SPACE = re.compile(r"\s*")
Found = tuple[dict[str, str | None] | None, int]
"""The parameters of a call, and its end."""


def named(before: str, after: str) -> re.Pattern:
    """Return the pattern of a tag with the group `name`, without space or quotes around it."""
    name = r"(?P<name>[^\s<>\"'](?:[^<>\n\"']*[^\s<>\"'])?)"
    return re.compile(rf"{before}\s*(?:[\"']\s*)?{name}\s*(?:[\"']\s*)?{after}")


@dataclass(frozen=True)
class TaggedParameters(Dialect):
    """Calls whose parameters stand between tags. A value may hold anything: it ends at a closing
    tag that is followed by what may follow a parameter. If a value seems to have swallowed a
    damaged tag, neither it nor its call counts."""

    function: tuple[str, str] = ("", "")
    """Texts around a call, with {} for its name."""
    parameter: tuple[str, str] = ("", "")
    """Texts around a parameter, with {} for its name, and a second {} for whether it is a text."""
    is_section: bool = False
    """Whether several calls stand between one pair of marks."""
    gap: str = ""
    """Text after a function's beginning and each parameter, in forms."""
    newline: str = ""
    """Text that is left out at both ends of a value."""
    head: Any = None
    """Pattern of a call's beginning, with the group `name`."""
    opened: Any = None
    """Pattern of a parameter's beginning, with the group `name`."""
    closed: Any = None
    """Pattern of a call's end."""
    parts: Any = None
    """Pattern of what begins a parameter (the group `open`) or ends it, also when damaged."""

    mark: Any = None
    """Pattern of a call's own mark and the word after it, None if calls have no mark."""

    quotes: tuple[str, ...] = ()

    def inside(self, text: str, tools: Tools) -> Pieces | None:
        # If both are possible, a name that is no parameter of the function is part of a text.
        return self._calls(
            text, tools, lambda at, schema: self._parameters(text, at, schema, schema.properties)
        ) or self._calls(text, tools, lambda at, schema: self._parameters(text, at, schema, ()))

    def mended(self, text: str, tools: Tools, has_end: bool) -> Pieces | None:
        def loose(at: int, schema: Schema) -> Found | None:
            found = self._parameters(text, at, schema, ())
            found = found or self._loose_parameters(text, at, schema, has_end)
            if found is None and self.is_section:
                following = self.head.search(text, at)
                return None, following.start() if following else len(text)
            return found

        pieces = self._calls(text, tools, loose, self.is_section)
        return super().mended(text, tools, has_end) if pieces is None else pieces

    def _calls(
        self,
        text: str,
        tools: Tools,
        read: Callable[[int, Schema], Found | None],
        may_be_cut: bool = False,
    ) -> Pieces | None:
        """Return the calls of a text, or None. read: finds the parameters after a call's head."""
        pieces: Pieces = []
        at = _SPACE.match(text).end()
        while at < len(text):
            if (head := self.head.match(text, at)) is None:
                if (read_json := self._json(text, at, tools)) is None:
                    return [*pieces, text[at:]] if may_be_cut and pieces else None
                calls, at = read_json
                pieces += calls
                continue
            found = read(head.end(), Schema(tools.get(head["name"], {})))
            if found is None:
                return None
            pieces.append(_call(head["name"], found[0], tools, text[at : found[1]].rstrip()))
            at = _SPACE.match(text, found[1]).end()
        return pieces

    def _json(self, text: str, at: int, tools: Tools) -> tuple[Pieces, int] | None:
        """Return the calls in JSON between a call's own marks, and their end."""
        opened = self.mark and self.mark.match(text, at)
        stop = text.find(self.inner[-1], opened.end()) if opened else -1
        if stop < 0:
            return None
        calls, after = json_calls(text[opened.end() : stop], tools), stop + len(self.inner[-1])
        if not any(isinstance(each, ToolCall) for each in calls or ()):
            calls = [text[at:after]]
        return calls, _SPACE.match(text, after).end()

    def _loose_parameters(self, text: str, at: int, schema: Schema, has_end: bool) -> Found | None:
        """Find parameters as `_parameters`, where tags are missing: values end at the next tag, and
        so does a call if the end mark follows. No text may hold an angle bracket."""
        found: dict[str, str | None] = {}
        while (opened := self.opened.match(text, at)) is not None:
            stop = text.find("<", opened.end())
            stop = len(text) if stop < 0 and has_end else stop
            value, name = text[opened.end() : stop], opened["name"]
            if stop < 0 or ">" in value or name in found:
                return None
            value = value.rstrip() if self.newline else value
            found[name] = schema.value(name, self._unwrapped(value))
            is_closed = text.startswith(self.parameter[1], stop)
            at = stop + len(self.parameter[1]) if is_closed else stop
        if (closed := self.closed.match(text, at)) is not None:
            # Before the end of a parameter it is a part of its text.
            is_text = text[closed.end() :].lstrip().startswith(self.parameter[1])
            return None if is_text else (found, closed.end())
        return (found, at) if has_end and not text[at:].strip() else None

    def _parameters(
        self, text: str, at: int, schema: Schema, names: Container[str]
    ) -> Found | None:
        """Find the parameters of a call (name -> JSON) and its end. Empty `names` allow any."""
        found: dict[str, str | None] = {}
        while (opened := self.opened.match(text, at)) is not None:
            name, close = opened["name"], self.parameter[1]
            stop = text.find(close, opened.end())
            while stop >= 0 and not self._follows(text, stop + len(close), {*found, name}, names):
                stop = text.find(close, stop + 1)
            value = self._unwrapped(text[opened.end() : stop])
            if stop < 0 or name in found or not self._is_whole(value, schema.types(name)):
                return None
            try:
                value.encode()
            except UnicodeEncodeError:
                return None
            found[name] = schema.value(name, value)
            at = stop + len(close)
        closed = self.closed.match(text, at)
        return None if closed is None else (found, closed.end())

    def _follows(self, text: str, at: int, known: set[str], names: Container[str]) -> bool:
        """Return whether a call's end or another parameter follows."""
        if (opened := self.opened.match(text, at)) is not None:
            name = opened["name"]
            return name not in known and (not names or name in names)
        if (closed := self.closed.match(text, at)) is None:
            return False
        at = _SPACE.match(text, closed.end()).end()
        return at == len(text) or self.head.match(text, at) is not None

    def _unwrapped(self, value: str) -> str:
        return value.removeprefix(self.newline).removesuffix(self.newline)

    def _is_whole(self, value: str, types: frozenset[str]) -> bool:
        """Return whether a value holds no tag of its call. In a text there may be pairs of tags, or
        single closing tags that nothing like a tag follows."""
        depth = 0
        for part in self.parts.finditer(value):
            if "string" not in types:
                return False
            if part["open"]:
                depth += 1
            elif depth:
                depth -= 1
            else:
                line = value[part.end() :].lstrip().partition("\n")[0].rstrip()
                if line.startswith("<") or line.endswith(">"):
                    return False
        return depth == 0

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        def parts(each: Json) -> tuple[str, Json, str]:
            before, after = (text.format(each["name"]) for text in self.function)
            schema = Schema(each)
            given = [self._form_of(schema, name) for name in schema.properties]
            if self.is_section:
                return before, sequence(*given), after
            return self.begin + before, sequence(*given), after + self.end

        if not self.is_section:
            return repeated(functions, parts, several, "\n")
        return sequence(f"{self.begin}\n", repeated(functions, parts, several, ""), self.end)

    def _form_of(self, schema: Schema, name: str) -> Json:
        is_text = str("string" in schema.types(name)).lower()
        before, after = (text.format(name, is_text) for text in self.parameter)
        end, content = self.newline + after, schema.form(name)
        if "string" in schema.types(name):
            content = schema.text_form(name, end)
        form = sequence(before + self.newline, content, end + self.gap)
        return form if name in schema.required else optional(form)


def _call(
    name: str, found: Mapping[str, str | None] | None, tools: Tools, written: str
) -> ToolCall | str:
    """Return a call with the JSON of `found`, without those that are None; or its text."""
    if found is None:
        return written
    given = {each: value for each, value in found.items() if value is not None}
    members = (f"{json.dumps(each, ensure_ascii=False)}: {v}" for each, v in given.items())
    return ToolCall(name, "{" + ", ".join(members) + "}") if name in tools else written


QWEN3_CODER = TaggedParameters(
    "<tool_call>",
    "</tool_call>",
    also=("<function=",),
    openers=("<function=",),
    function=("\n<function={}>\n", "</function>\n"),
    parameter=("<parameter={}>", "</parameter>"),
    gap="\n",
    newline="\n",
    head=named("<function=", ">"),
    opened=named(r"\s*<parameter=", ">"),
    closed=re.compile(r"\s*</function>"),
    parts=re.compile(r"(?P<open><?parameter=|<parameter)|</?parameter>|/parameter>"),
)
SEED_OSS = replace(QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>")


def invoke_tags(
    section: tuple[str, str], space: str = "", flag: str = "", call: tuple[str, ...] = ()
) -> TaggedParameters:
    """Return a dialect of tags `invoke` with tags `parameter`.

    Args:
        section: marks around all calls.
        space: prefix of the names of the tags.
        flag: further attribute of a parameter, with {} for whether it is a text.
        call: marks before each call, after the word for its kind, and after the call.
    """
    begin, end = (f"{call[0]}function{call[1]}", call[2]) if call else ("", "")
    opened = rf"{call[0]}\s*(?:\w+\s*{call[1]}\s*)?" if call else ""
    invoke, parameter = f"<{space}invoke name=", f"<{space}parameter name="
    return TaggedParameters(
        *section,
        inner=call,
        also=(*call[:1], invoke),
        openers=(*call[:1], invoke),
        function=(f'{begin}{invoke}"{{}}">\n', f"</{space}invoke>{end}\n"),
        is_section=True,
        parameter=(f'{parameter}"{{}}"{flag}>', f"</{space}parameter>"),
        gap="\n",
        head=named(rf"(?:{opened})?{invoke}", ">"),
        mark=re.compile(opened) if call else None,
        opened=named(rf"\s*{parameter}", r'(?:\w+="\w+")?>'),
        closed=re.compile(rf"\s*</{space}invoke>(?:\s*{re.escape(end)})?"),
        parts=re.compile(
            rf'(?P<open><?{parameter[1:]}"|<{space}parameter)|</?{space}parameter>|/parameter>'
        ),
    )


MINIMAX_M2 = invoke_tags(("<minimax:tool_call>", "</minimax:tool_call>"))
_DSML = "｜DSML｜"  # noqa: RUF001
DEEPSEEK_V32 = invoke_tags(
    (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"), _DSML, ' string="{}"'
)
DEEPSEEK_V4 = replace(DEEPSEEK_V32, begin=f"<{_DSML}tool_calls>", end=f"</{_DSML}tool_calls>")
STEP3 = invoke_tags(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),  # noqa: RUF001
    "steptml:",
    call=("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),  # noqa: RUF001
)
GLM45 = TaggedParameters(
    "<tool_call>",
    "</tool_call>",
    openers=("",),
    function=("{}\n", ""),
    parameter=("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    gap="\n",
    head=re.compile(r"(?P<name>[^\s<{]+)(?=\s*(<arg_key>|\Z))"),
    opened=named(r"\s*<arg_key>", r"</arg_key>\s*<arg_value>"),
    closed=re.compile(r"\s*\Z"),
    parts=re.compile(r"(?P<open><arg_value>|(?<!/)arg_value>)|</?arg_value>|/arg_value>"),
)
