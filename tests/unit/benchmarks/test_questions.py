"""The questions of docs/measured/questions: their answers hold at small sizes, and the pages have
what the commands print."""

import json
import re

import pytest

from benchmarks.plots import RESULTS
from benchmarks.questions import (
    cheaper_when_longer,
    memory_at_100k,
    memory_only_or_restore,
    no_alignment_flags,
    state_dtypes,
    windows_keep_their_prefix,
)
from benchmarks.questions.__main__ import NAMES, PAGES
from benchmarks.questions.common import WIDTH, aligned, engine_of, random_tokens, small_model

MODEL = small_model(cheaper_when_longer.PATTERN)


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


@pytest.mark.parametrize("name", NAMES)
def test_each_page_has_its_command_and_a_table_of_80_columns(name):
    text = page(name)
    assert f"`python -m benchmarks.questions {name}`" in text
    [table] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert re.match(r"\d{4}-\d\d-\d\d, ", table)
    assert max(map(len, table.splitlines())) <= WIDTH


def test_wide_tables_are_refused():
    with pytest.raises(ValueError, match="has 81 columns, the limit is 80"):
        list(aligned([("a" * 70, "b" * 9)]))


def test_the_rule_of_blocks_computes_what_vllms_own_manager_did():
    """The same prompt again, as recorded by `make bench-replay` with vLLM 0.33; and the rows of the
    page, where ours computes nothing."""
    cliffs = json.loads((RESULTS / "replay.json").read_text(encoding="utf-8"))["cliffs"]
    [cliff] = [each for each in cliffs if each["engine"] == "vllm"]
    recorded = dict(zip(cliff["lengths"], cliff["repeated"], strict=True))
    tails, shown = [[1], [2], [3]], page("cheaper_when_longer")
    for length in cheaper_when_longer.SHOWN:
        again, shared = cheaper_when_longer.computed_in_blocks([7] * length, tails)
        assert [str(length), "0", str(again), "0", str(shared)] in map(cells, shown.splitlines())
        if length % 16 == 0:
            assert recorded[length] == again


def test_a_prompt_of_any_length_is_not_computed_again():
    tokens, tails = random_tokens(0, MODEL, 37), random_tokens(1, MODEL, 3, 5)
    assert cheaper_when_longer.computed_here(engine_of(MODEL), tokens, tails) == (0, 0)


def test_no_flag_has_to_be_aligned():
    *_, line = no_alignment_flags.run(((64, 50),), 120, MODEL)
    assert cells(line) == ["64, 50", "120", "0", "0", "30", "yes"]


def test_windows_keep_their_prefix():
    *_, first, second, total, same = windows_keep_their_prefix.run(150, 2, 32)
    assert cells(first) == ["1", "190", "190", "190", "190"]
    assert cells(second) == ["2", "250", "40", "240", "50"]
    assert cells(total) == ["all", "440", "230", "430", "240"] and same.endswith("the same")


def test_restore_computes_one_of_equal_prompts():
    *_, off, shared, restored, same = memory_only_or_restore.run(2, 40, MODEL)
    assert [cells(line)[:5] for line in (off, shared, restored)] == [
        ["off", "40", "40", "80", "80"],
        ["memory_only", "40", "40", "80", "80"],
        ["restore", "40", "0", "40", "40"],
    ]
    assert same.endswith("the same")


def test_memory_at_100k_follows_from_the_config():
    name, file = memory_at_100k.MODELS[-1]
    config = json.loads((memory_at_100k.CONFIGS / f"{file}.json").read_text(encoding="utf-8"))
    head = config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 2
    *_, line = memory_at_100k.run([(name, file)])
    kv = f"{token * 1e5 / 1e9:.2f}"
    assert cells(line)[:-1] == [name, f"{token // 1024}", kv, "0.00", "0.000", kv]
    assert cells(line) in map(cells, page("memory_at_100k").splitlines())


def test_fp32_states_are_the_most_exact():
    lines = list(state_dtypes.run(150, 50))
    errors = [float(line.split()[-1]) for line in lines if line.startswith("inputs")]
    assert errors[0] < errors[2] / 10 < errors[1] / 10  # steps: fp32, bf16, fp16
    assert errors[3] < errors[5] / 10 < errors[4] / 10  # segments
