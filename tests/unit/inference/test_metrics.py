"""Prometheus metrics against the client library's parser, and the counters they come from."""

import json
import re
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families
from reference import random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.report import CacheStats, MissReason
from megatron_hybrid.inference.metrics import Stats, prometheus_text
from megatron_hybrid.offload.fetch import FetchStats

LINE = re.compile(
    r"# HELP (?P<help>megatron_hybrid_[a-z_]+) [^\\\n]+\.\n"
    r"# TYPE (?P=help) (?P<kind>counter|gauge)\n"
    r'(?:(?P=help)(?:\{reason="[a-z_]+"\})? \d+\n)+'
)


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(tiny_model("M*"))
    prompt = random_tokens(60)
    for length in (60, 50, 60):  # the second resumes from a rung and loses the tokens behind it
        engine.generate([prompt[:length]])
    return engine


def parsed(text):
    """Values by name, and label where there is one; kinds by name."""
    values, kinds = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            reason = sample.labels.pop("reason", None)
            assert not sample.labels
            key = sample.name if reason is None else (sample.name, reason)
            assert key not in values
            values[key], kinds[sample.name] = sample.value, family.type
    return values, kinds


def test_every_counter_appears_once_with_its_value(engine):
    values, kinds = parsed(engine.metrics())
    stats = engine.stats()
    lost = {
        reason.value: values.pop(("megatron_hybrid_lost_tokens_total", reason.value))
        for reason in MissReason
    }
    assert lost == {reason: stats[f"lost_tokens_{reason}"] for reason in lost}
    assert lost["state_never_saved"] > 0
    stats = {key: value for key, value in stats.items() if not key.startswith("lost_tokens_")}
    assert len(values) == len(stats)
    for key, value in stats.items():
        name = f"megatron_hybrid_{key}"
        counted = kinds.get(f"{name}_total") == "counter"
        assert values[f"{name}_total" if counted else name] == value, key
        assert counted or kinds[name] == "gauge"
    assert values["megatron_hybrid_requests_total"] == 3
    assert 60 < values["megatron_hybrid_skipped_tokens_total"] < 110


def test_what_only_grows_is_a_counter(engine):
    _, kinds = parsed(engine.metrics())
    grows = {field.name for field in [*fields(CacheStats), *fields(FetchStats)]}
    grows |= {
        "steps",
        "forward_tokens",
        "prefill_tokens",
        "preemptions",
        "rank_bytes",
        "step_failures",
        "request_restarts",
        "weight_changes",
        "lost_tokens",
    }
    grows |= {"host_records_evicted", "disk_records_evicted", "disk_records_unwritten"}
    grows |= {"host_without_memory", "disk_without_memory"}
    counters = {f"megatron_hybrid_{name}_total" for name in grows}
    assert {name for name, kind in kinds.items() if kind == "counter"} == counters


def test_the_grammar_to_the_letter(engine):
    """The parser forgives much: here every metric is HELP, TYPE and its samples, once; the names of
    counters, and no others, end in _total."""
    text = engine.metrics()
    found = list(LINE.finditer(text))
    assert "".join(match[0] for match in found) == text
    names = [match["help"] for match in found]
    assert len(set(names)) == len(names)
    for match in found:
        assert match["help"].endswith("_total") == (match["kind"] == "counter")


def test_a_cache_alone_has_metrics(engine):
    values, _ = parsed(prometheus_text(engine.cache.stats()))
    assert values["megatron_hybrid_prompt_tokens_total"] == 170
    assert "megatron_hybrid_steps_total" not in values


def test_an_undeclared_counter_is_refused():
    with pytest.raises(ValueError, match="no metric is declared for 'new_thing'"):
        prometheus_text({"new_thing": 1})


def test_no_lost_tokens_no_metric():
    assert "lost_tokens" not in prometheus_text({"requests": 1})


def test_printed_stats_have_a_hit_rate_and_groups_in_80_columns(engine):
    stats = engine.stats()
    text = str(stats)
    assert max(map(len, text.splitlines())) <= 80
    rate = stats["skipped_tokens"] / stats["prompt_tokens"]
    assert text.startswith(f"hit rate: {rate:.1%} of 170 prompt tokens skipped, ")
    said = dict(re.findall(r"([a-z_]+) ([\d,]+)(?=,|\n|$)", text))
    kept = {key.removeprefix("lost_tokens_"): value for key, value in stats.items() if value}
    assert {key: int(value.replace(",", "")) for key, value in said.items()} == kept
    heads = re.findall(r"(?m)^([a-z]+(?:,? [a-z]+)?)  ", text)
    assert heads == ["requests", "tokens", "lost tokens", "cached", "pool"]
    assert dict(stats) == json.loads(json.dumps(stats))  # still a dict


def test_every_statistic_has_its_group(engine):
    text = str(Stats({key: 1 for key in engine.stats()}))
    assert "other" not in text and "host, disk" in text


def test_stats_of_an_engine_that_did_nothing():
    assert str(tiny_engine(tiny_model("M*")).stats()).startswith("no prompt yet\npool ")
