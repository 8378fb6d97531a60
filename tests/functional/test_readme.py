"""What a newcomer copies runs as it stands there, and shows what the text beside it says."""

import re
from pathlib import Path

import megatron_hybrid as mh

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_ten_lines_skip_what_was_seen(capsys):
    (block,) = blocks("README.md")
    assert len(block.splitlines()) <= 12
    exec(block, {})
    printed = capsys.readouterr().out
    (first, second) = re.findall(r"tokens: prompt (\d+), skipped (\d+)", printed)
    assert int(first[1]) == 0 and int(second[1]) > 0.7 * int(second[0])
    assert re.search(r"\d+ of \d+ prompt tokens are skipped", printed)


def test_the_chat_of_the_python_guide_runs_on_the_demo_model():
    page = "docs/guides/python.md"
    (block,) = [block for block in blocks(page) if block.startswith("messages =")]
    model, tokenizer = mh.load_pretrained("demo")
    config = mh.InferenceConfig(cache_bytes=32 << 20)
    engine = mh.DynamicInferenceEngine(model, tokenizer, config)
    names = {"mh": mh, "engine": engine, "tokenizer": tokenizer}
    exec(block, names)
    assert tokenizer.detokenize(names["tokens"]) == "You are brief.\nHello\n"
    report = engine.generate([names["messages"]])[0].prefix
    assert report.skipped_tokens == report.prompt_tokens == len(names["tokens"])
