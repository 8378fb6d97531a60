"""The example of an agent and its page, against one server of the demo model."""

import re
from pathlib import Path

import agent
import pytest
from http_server import running_server

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        source = (ROOT / "examples" / "agent.jinja").read_text()
        server.service.tokenizer.set_chat_template(source)
        yield server


def test_each_turn_of_the_agent_skips_the_prompt_of_the_one_before(server, monkeypatch, capsys):
    monkeypatch.setattr(agent, "PLAN", ["look_up"])
    agent.main(["--url", server.url])
    head, *rows, total = capsys.readouterr().out.splitlines()
    turns = [re.fullmatch(r" *(\d+) +(\d+) +(\d+)  (.+)", row).groups() for row in rows]
    (_, first, none, called), (_, second, skipped, _) = turns
    assert re.match(r'look_up \{ ?"person" ?: ?"(king|queen|eldest|youngest)" ?\}', called)
    assert none == "0" and skipped == first and int(second) > int(first)
    assert total.startswith(f"{skipped} of {int(first) + int(second)} prompt tokens were skipped")
    assert max(map(len, (head, *rows, total))) <= 80


def test_the_tools_of_the_agent_answer_and_tell_what_was_wrong():
    assert agent.result_of("look_up", '{"person": "king"}') == "61"
    assert agent.result_of("calculate", '{"expression": "61 - 19"}') == "42"
    wrong = [("look_up", '{"person": "cat"}'), ("calculate", '{"expression": "1"}'), ("sing", "{}")]
    assert all(agent.result_of(*each).startswith("error: ") for each in [*wrong, ("look_up", "{")])


def test_the_page_of_agents_shows_what_explain_says(server, capsys):
    page = (ROOT / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
    pattern = r"```python\n(.*?)```\n\n```text\n(.*?)```"
    ((code, shown),) = re.findall(pattern, page, re.DOTALL)
    exec(code.replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out == shown
