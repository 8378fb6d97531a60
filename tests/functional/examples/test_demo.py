"""Examples of the demo model: its corpus as files for preprocess, without fetching any; its curve's
held-out loss against cross entropies of torch; an agent and its page, against one server."""

import re
from pathlib import Path

import agent
import demo_corpus
import demo_curve
import pytest
import torch
import torch.nn.functional as F
from http_server import running_server
from index_folders import write_documents

import megatron_hybrid as mh
from megatron_hybrid.text.document_files import read_texts


def test_each_document_is_a_line_of_one_of_two_files(tmp_path):
    documents = [demo_corpus.Document("book", f"Chapter {i}.\n\nIt was late.") for i in range(64)]
    counts = demo_corpus.write_jsonl(documents, tmp_path / "text")
    train, held_out = (
        list(read_texts([tmp_path / "text" / f"{name}.jsonl"], "text")) for name in counts
    )
    assert (len(train), len(held_out)) == tuple(counts.values()) and len(held_out) > 0
    assert train == [each.text for each in documents if not each.held_out]
    assert held_out == [each.text for each in documents if each.held_out]


def test_the_documented_losses_are_read_from_the_table():
    assert [demo_curve.documented_loss(step) for step in (200, 1000, 2900)] == [4.375, 3.847, 3.388]
    with pytest.raises(SystemExit, match="has no step 2,000"):
        demo_curve.documented_loss(2000)


@torch.no_grad()
def test_a_document_is_read_whole_and_each_token_counts_alike(tmp_path, default_group):
    model, tokenizer = mh.load_pretrained("demo")
    generator = torch.Generator().manual_seed(0)
    documents = [
        torch.randint(3072, (length,), generator=generator).tolist() for length in (2, 40, 200)
    ]
    prefix = write_documents(tmp_path / "held_out", documents, tokenizer)
    losses = []
    for document in map(torch.tensor, documents):
        logits = model(document[None, :-1])[0].double()
        losses.append(F.cross_entropy(logits, document[1:], reduction="none"))
    expected = torch.cat(losses).mean().item()
    assert demo_curve.held_out_loss(model, prefix) == pytest.approx(expected, abs=1e-3)


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
