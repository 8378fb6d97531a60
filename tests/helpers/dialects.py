"""The chat templates of dialects, and answers written by them."""

import json
import re
from functools import cache
from pathlib import Path

from megatron_hybrid.text.chat_template import ChatTemplate

FOLDER = Path(__file__).parents[1] / "unit" / "serving" / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = re.compile(
    r"(<\|im_end\|>|<\|eot(_id)?\|>|</s>|<｜end▁of▁sentence｜>|\n<SPECIAL_12>|\[e~\[|"  # noqa: RUF001
    r"<\|end_of_text\|>|<\|eom\|>|<(end_of_)?turn\|?>|<\|end\|>|<\|call\|>)\s*\Z"
)
"""Of turns."""
WITH_TEXT = ("deepseek_v3", "deepseek_v31")
"""Templates that take the arguments of a call as JSON in a text."""


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(template(name))


def turn(name: str, message: dict) -> str:
    """What a model that writes by this template says, up to the end of its turn."""
    before, kind = [{"role": "user", "content": "?"}], compiled(name)
    prompt = kind.render(before, True, **TOKENS)
    whole = kind.render([*before, message], False, **TOKENS)
    if name == "deepseek_v31" or not whole.startswith(prompt):
        prompt = re.sub(r"<think>\s*\Z", "", prompt)
    assert whole.startswith(prompt), (prompt, whole)
    return ENDS.sub("", whole.removeprefix(prompt))


def message_of(name: str, calls, content: str = "", **more) -> dict:
    """Of the assistant. calls: names and arguments."""
    written = [
        {
            "type": "function",
            "id": f"functions.{called}:{index}" if name == "kimi_k2" else f"call{index:05}",
            "function": {
                "name": called,
                "arguments": json.dumps(given, ensure_ascii=False) if name in WITH_TEXT else given,
            },
        }
        for index, (called, given) in enumerate(calls)
    ]
    given = {"tool_calls": written} if calls else {}
    return {"role": "assistant", "content": content, **given, **more}
