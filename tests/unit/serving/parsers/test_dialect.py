"""What is a call and what is content is the same in all dialects, whole and in letters."""

import json

import pytest
from call_behaviours import MISSES, PAGE, ROWS, TOOLS, WAYS, page

from megatron_hybrid.serving.parsers.choice import TOOL_PARSERS, style_of
from megatron_hybrid.serving.parsers.dialect import Content, Reasoning, ToolCall


def read(row, texts):
    style = style_of("", row.dialect, "openai_gptoss" if row.dialect == "openai" else "qwen3")
    parser = style.parser(TOOLS, is_thinking=row.thinks)
    found = [part for text in texts for part in parser.add(text)] + parser.end()
    said = {
        kind: "".join(part.text for part in found if isinstance(part, kind)).strip()
        for kind in (Reasoning, Content)
    }
    ids = [part.id for part in found if isinstance(part, ToolCall)]
    assert len({*ids}) == len(ids)
    calls = [(p.name, json.loads(p.arguments)) for p in found if isinstance(p, ToolCall)]
    return calls, said[Content], said[Reasoning]


@pytest.mark.parametrize("dialect", sorted({row.dialect for row in ROWS}))
def test_each_row(dialect):
    wrong = []
    for row in [*ROWS, *MISSES]:
        if row.dialect == dialect:
            right = row.calls, row.content.strip(), row.reasoning.strip()
            for texts in ([row.text], list(row.text)):
                if (got := read(row, texts)) != right:
                    wrong.append((row.behaviour, len(texts), row.text, got, right))
    assert not wrong


def test_each_dialect_has_its_rows():
    """Harmony, of which a call is a message, has its own."""
    shown = [TOOL_PARSERS[name] for name in (*WAYS, "openai")]
    assert all(any(dialect is each for each in shown) for dialect in TOOL_PARSERS.values())


def test_the_page_shows_all_rows():
    assert len(ROWS) >= 300
    assert PAGE.read_text(encoding="utf-8") == page()
