"""Prometheus metrics against the client library's parser, and the counters they come from."""

import json
import re

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.inference.metrics.meter import BOUNDS, LOG_SECONDS, ActivityLog, Histogram
from megatron_hybrid.inference.metrics.prometheus import (
    HISTOGRAMS,
    VLLM_NAMES,
    Stats,
    prometheus_text,
)
from megatron_hybrid.inference.requests.options import RequestOptions

LINE = re.compile(
    r"# HELP (?P<help>(?:megatron_hybrid_|vllm:)[a-z0-9_]+) [^\\\n]+\.\n"
    r"# TYPE (?P=help) (?P<kind>counter|gauge|histogram)\n"
    r'(?:(?P=help)(?:\{\w+="[^}\n]+\}|_bucket\{le="[^"]+"\}|_sum|_count)? [\d.e-]+\n)+'
)


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(tiny_model("M*"))
    prompt = random_tokens(60)
    for length in (
        60,
        50,
        60,
    ):  # the second resumes from an interval and loses the tokens behind it
        engine.generate([prompt[:length]])
    return engine


def parsed(text):
    """Values by name, and label where there is one; kinds by name. Without histograms and the names
    of vLLM."""
    values, kinds = {}, {}
    for family in text_string_to_metric_families(text):
        if family.type == "histogram" or family.name.startswith("vllm:"):
            continue
        if family.name.endswith(("request_success", "cache_config_info")):
            continue
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


def test_printed_stats_have_a_hit_rate_and_groups_in_80_columns(engine):
    stats = engine.stats()
    text = str(stats)
    assert max(map(len, text.splitlines())) <= 80
    rate = stats["skipped_tokens"] / stats["prompt_tokens"]
    assert stats["hit_rate"] == rate and text.startswith(f"hit_rate {rate:.1%}\n")
    said = dict(re.findall(r"([a-z_]+) ([\d,]+)(?=,|\n|$)", text))
    kept = {key: value for key, value in stats.items() if value and key != "hit_rate"}
    assert {key: int(value.replace(",", "")) for key, value in said.items()} == kept
    heads = re.findall(r"(?m)^([a-z]+(?:,? [a-z]+)?)  ", text)
    assert heads == ["requests", "tokens", "lost tokens", "cached", "pool"]
    assert dict(stats) == json.loads(json.dumps(stats))  # still a dict


def test_every_statistic_has_its_group(engine):
    text = str(Stats({key: 1 for key in engine.stats()}))
    assert "other" not in text and "host, disk" in text


def test_stats_of_an_engine_that_did_nothing():
    assert str(tiny_engine(tiny_model("M*")).stats()).startswith("no prompt yet\npool ")


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_histogram_is_that_of_the_client_library():
    times = [0.0, 0.0004, 0.001, 0.0011, 0.02, 0.3, 0.3, 499.0, 500.0, 501.0]
    registry, ours = CollectorRegistry(), Histogram()
    name = "megatron_hybrid_step_time_seconds"
    theirs = TheirHistogram(name, "Of steps.", buckets=BOUNDS, registry=registry)
    for seconds in times:
        theirs.observe(seconds)
        ours.observe(seconds)
    ours.observe(0.25, times=3)
    for _ in range(3):
        theirs.observe(0.25)

    def samples(text):
        return {
            (sample.name, sample.labels.get("le")): sample.value
            for sample in families(text)[name].samples
            if not sample.name.endswith("_created")
        }

    expected = samples(generate_latest(registry).decode())
    found = samples(prometheus_text({}, {"step_time_seconds": ours}))
    assert found.keys() == expected.keys() and found == pytest.approx(expected)


def test_histograms_count_requests_tokens_and_steps():
    engine = tiny_engine(tiny_model("M*"))
    prompt = random_tokens(60)
    results = engine.generate([prompt, prompt[:30]], options=[None, RequestOptions(n=3)])
    drawn = sum(len(sample.token_ids) for r in results for sample in r.samples)
    found = families(engine.metrics())

    def value(name, suffix):
        (sample,) = (s for s in found[name].samples if s.name == name + suffix)
        return sample.value

    for name in HISTOGRAMS:
        name = f"megatron_hybrid_{name}"
        buckets = [s.value for s in found[name].samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == value(name, "_count")
        assert value(name, "_sum") > 0
    count = {name: value(f"megatron_hybrid_{name}", "_count") for name in HISTOGRAMS}
    assert count["step_time_seconds"] == engine.num_steps
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time"):
        assert count[f"{name}_seconds"] == 2
    assert count["e2e_request_latency_seconds"] == 2
    for prefix in ("megatron_hybrid_", "vllm:"):
        samples = found[f"{prefix}request_success"].samples
        ended = {sample.labels["finished_reason"]: sample.value for sample in samples}
        assert ended == {"length": 4, "stop": 0, "abort": 0, "error": 0}
        (info,) = found[f"{prefix}cache_config_info"].samples
        assert info.labels["block_size"] == str(engine.config.block_size_tokens)
        assert info.labels["enable_prefix_caching"] == "True" and info.value == 1
    assert count["inter_token_latency_seconds"] == engine.stats()["generation_tokens"] - 4
    assert engine.stats()["generation_tokens"] == drawn
    total = {name: value(f"megatron_hybrid_{name}", "_sum") for name in HISTOGRAMS}
    parts = total["request_queue_time_seconds"] + total["request_prefill_time_seconds"]
    assert parts == pytest.approx(total["time_to_first_token_seconds"])
    assert total["time_to_first_token_seconds"] == pytest.approx(
        sum(result.time_to_first_token for result in results), abs=0.05
    )


def test_names_of_vllm_have_the_values_of_ours(engine):
    found, stats = families(engine.metrics()), engine.stats()
    for name, (key, *whole) in VLLM_NAMES.items():
        ours = found[f"megatron_hybrid_{key}"]
        theirs = found[f"vllm:{name}"]
        values = [sample.value for sample in ours.samples]
        if whole:
            values = [stats[key] / stats[whole[0]]]
        assert theirs.type == ours.type
        assert [sample.value for sample in theirs.samples] == pytest.approx(values)
    hits, queries = (
        found[f"vllm:prefix_cache_{name}"].samples[0].value for name in ("hits", "queries")
    )
    assert 0 < hits < queries == 170


def test_a_line_every_ten_seconds_while_there_is_work(caplog):
    engine = tiny_engine(tiny_model("M*"))
    log, stats = ActivityLog(), engine.stats()
    assert not log.is_due(0.0)  # nobody would read it
    with caplog.at_level("INFO", "megatron_hybrid"):
        for step in range(25):
            now = 100.0 + step
            if log.is_due(now):
                log.write(stats, now)
                stats = {key: value + 50 for key, value in stats.items()}
            log.until = now + 1
        assert log.is_due(1000.0)  # after a pause: of the five seconds before it
        log.write(stats, 1000.0)
    assert LOG_SECONDS == 10 and len(caplog.messages) == 3
    assert "prefill 5.0 tokens/s, decode 5.0 tokens/s; 100.0% of 50 new" in caplog.messages[0]
    assert "prefill 10.0 tokens/s" in caplog.messages[2]


def test_accepted_drafts_are_counted_by_their_place_under_the_names_of_vllm():
    engine = tiny_engine(tiny_model("M*"), speculation="lookup", num_speculative_tokens=2)
    for _ in range(2):
        engine.generate([random_tokens(20)], greedy(30))
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(engine.metrics())
        for sample in family.samples
    }
    stats, vllm = engine.stats(), "vllm:spec_decode_num_"
    places = [samples[f"{vllm}accepted_tokens_per_pos_total", str(i)] for i in range(2)]
    assert sum(places) == stats["draft_tokens_accepted"] > 10 and places[0] >= places[1]
    assert samples[f"{vllm}accepted_tokens_total", None] == sum(places)
    assert samples[f"{vllm}draft_tokens_total", None] == stats["draft_tokens"]
    assert ("megatron_hybrid_draft_tokens_accepted_per_pos_total", "2") not in samples
