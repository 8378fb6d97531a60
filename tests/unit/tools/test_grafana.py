"""The dashboard names metrics that an engine has, and its shares are weighted by tokens."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from reference import random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cli import main

NAME = re.compile(r"megatron_hybrid_\w+")
OF_THE_SERVER = {"megatron_hybrid_http_responses_total"}
"""tests/functional/serving/test_server.py scrapes it."""


@pytest.fixture(scope="module")
def samples():
    """Those of an engine that has answered something, by name."""
    engine = tiny_engine(tiny_model("M*"))
    engine.generate([random_tokens(40)])
    found = {}
    for family in text_string_to_metric_families(engine.metrics()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((family.type, sample.labels))
    return found


@pytest.fixture
def panels(capsys):
    assert main(["grafana"]) == 0
    return json.loads(capsys.readouterr().out)["panels"]


def expressions(panels):
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_one_of_the_engine(panels, samples):
    for expression in expressions(panels):
        names = NAME.findall(expression)
        assert names
        for name in set(names) - OF_THE_SERVER:
            assert name in samples, expression
            kind, labels = samples[name][0]
            # A counter or a bucket is read as a rate, and nothing else is.
            assert (f"rate({name}[" in expression) == (kind != "gauge"), expression
            for label in re.findall(r"by \((\w+)\)", expression):
                assert label in labels


def test_shares_of_prompt_tokens_are_rates_of_tokens_and_no_mean_of_shares(panels):
    (panel,) = (panel for panel in panels if panel["title"] == "Prompt tokens reused")
    for target, part in zip(panel["targets"], ("skipped", "shared", "fetched"), strict=True):
        assert target["expr"] == (
            f"sum(rate(megatron_hybrid_{part}_tokens_total[$__rate_interval])) / "
            "sum(rate(megatron_hybrid_prompt_tokens_total[$__rate_interval]))"
        )
    assert not any("avg" in expression for expression in expressions(panels))


def test_panels_do_not_overlap(panels):
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
