"""What the reference says is what the code has."""

import argparse
import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import megatron_hybrid
from docs_tools.hook import on_page_content, on_page_markdown
from docs_tools.reference import MARK, PAGES_OF_FILES, expand, file
from docs_tools.source import read_class
from megatron_hybrid import HybridConfig, InferenceConfig
from megatron_hybrid.cli import COMMANDS, command_parser
from megatron_hybrid.inference.metrics.meter import Histogram
from megatron_hybrid.inference.metrics.prometheus import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    prometheus_text,
    requests_text,
)
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.models.config.field_group import FieldGroup
from megatron_hybrid.serving.protocols import fields as http
from megatron_hybrid.serving.protocols.messages import MessageFields
from megatron_hybrid.serving.protocols.responses import ResponseFields
from megatron_hybrid.serving.trainer_routes import FinishFields, InitFields, UpdateFields
from megatron_hybrid.training.checkpoints import CheckpointFields
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.dpo import DpoFields
from megatron_hybrid.training.grpo import GrpoFields
from megatron_hybrid.training.lora import LoraFields
from megatron_hybrid.training.optimizer import OptimizerFields
from megatron_hybrid.training.recipe import Recipe, RunFields
from megatron_hybrid.training.reports import ReportFields

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
SECTIONS = (
    *(DataFields, RunFields, OptimizerFields, LoraFields, DpoFields, GrpoFields),
    *(CheckpointFields, ReportFields),
)
BODIES = (
    *(http.CompletionFields, http.ChatFields, ResponseFields, MessageFields),
    *(http.TokenizeFields, http.DetokenizeFields, http.ExplainFields, http.AbortFields),
    *(http.ResponseFormat, http.StructuredOutputs, http.StreamOptions, http.Function),
    *(InitFields, UpdateFields, FinishFields),
)


def page(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def dotted(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def test_the_api_has_each_public_name_once():
    named = re.findall(
        r"^::: megatron_hybrid\.(\w+)$",
        "".join(path.read_text() for path in REFERENCE.glob("api/*.md")),
        re.MULTILINE,
    )
    assert sorted(named) == sorted({*megatron_hybrid.__all__} - {"__version__"})
    listed = page("api/index.md")
    assert [name for name in named if f"`{name}`" not in listed] == []


def default_of(field: dataclasses.Field) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@pytest.mark.parametrize(
    "of", [InferenceConfig, RequestOptions, *SECTIONS], ids=lambda of: of.__name__
)
def test_fields_have_the_defaults_and_words_of_the_dataclass(of):
    shown = read_class(dotted(of)).fields
    known = dataclasses.fields(of)
    assert [field.name for field in shown] == [field.name for field in known]
    for field, real in zip(shown, known):
        assert field.about, field.name
        if field.default is None:
            assert default_of(real) is dataclasses.MISSING
        elif not field.default.startswith("list("):
            shift = re.fullmatch(r"(\d+) << (\d+)", field.default)
            default = str(int(shift[1]) << int(shift[2])) if shift else field.default
            assert ast.literal_eval(default) == default_of(real)


def test_the_configuration_has_every_field_of_a_model_once():
    text = expand(page("config.md")).partition("## HybridConfig")[2]
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    groups = [base for base in HybridConfig.__mro__[1:] if issubclass(base, FieldGroup)]
    declared = {name for base in groups for name in inspect.get_annotations(base)}
    assert set(named) == declared & {field.name for field in dataclasses.fields(HybridConfig)}
    assert len(named) == len(set(named))


def test_recipes_have_every_section():
    marked = {name for kind, name in MARK.findall(page("recipes.md"))}
    assert marked == {dotted(of) for of in (Recipe, *SECTIONS)}
    sections = {field.name for field in dataclasses.fields(Recipe)} - {"model", "tokenizer"}
    assert sections <= set(re.findall(r"^## (\w+)$", page("recipes.md"), re.MULTILINE))


def test_every_field_of_a_body_is_documented():
    marked = {name for kind, name in MARK.findall(page("http.md"))}
    for body in BODIES:
        shown = {
            field.name: field
            for base in body.__mro__
            if dotted(base) in marked
            for field in read_class(dotted(base)).fields
        }
        real = {field.alias or name: field for name, field in body.model_fields.items()}
        assert shown.keys() == real.keys(), body
        assert [name for name, field in shown.items() if not field.about] == []


def test_limits_of_a_field_are_those_of_its_schema():
    shown = {field.name: field.type for field in read_class(dotted(http.SharedFields)).fields}
    schema = http.SharedFields.model_json_schema()["properties"]
    assert shown["top_p"] == "float (0 or more, at most 1) | None"
    assert schema["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
    assert shown["truncation_side"] == "'left' | 'right'"


def test_the_command_line_has_every_option():
    text = expand(page("command_line.md"))
    for name in COMMANDS:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for action in command_parser(name)._actions:
            if action.dest != "help" and action.help != argparse.SUPPRESS:
                for option in action.option_strings:
                    assert re.search(rf"[`, ]{option}[`, ]", section), (name, option)


def test_metrics_are_those_that_are_scraped():
    stats = dict.fromkeys((*COUNTERS, *GAUGES), 1) | {"lost_tokens_budget": 1}
    stats |= {"draft_tokens_accepted_at_0": 1}
    scraped = (
        prometheus_text(stats, {name: Histogram() for name in HISTOGRAMS})
        + requests_text({}, {"block_size": 16})
        + "# TYPE megatron_hybrid_http_responses_total counter\n"
    )
    named = re.findall(r"`((?:vllm:|megatron_hybrid_)\w+)`", expand(page("metrics.md")))
    assert set(named) == set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))


def test_files_of_the_repository_are_pages():
    assert (REFERENCE.parents[1] / "SECURITY.md").exists()
    for path, name in PAGES_OF_FILES.items():
        assert MARK.findall(page(name)) == [("file", path)]
        assert not file(path).startswith("# ")
    shown = file("CONTRIBUTING.md")
    assert (
        "(../guides/own_model.md#add-a-layer-kind)" in shown
        and "[CHANGELOG.md](changelog.md)" in shown
    )
    assert "`megatron_hybrid/ops/norm/`: the smallest" in shown and "`SECURITY.md`" in shown


def test_a_link_has_no_link_in_it():
    html = '<a href="x">docs/index.md</a> <a id="y"></a>'
    assert on_page_content(html, None, None) == html


def test_a_pipe_in_code_is_shown_without_what_the_table_needs():
    row = "| `a \\| b` \\| c | `d` |\n"
    assert on_page_markdown(row + "`a \\| b`\n") == "| `a | b` \\| c | `d` |\n`a \\| b`\n"
