"""All of `python -m benchmarks.gpu` at toy size on a CPU: the code runs, and claims no more."""

import json

import pytest
import torch

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.core_engine import CORE, OurEngine, Sizes, compare
from benchmarks.gpu.models import CONFIGS, SHAPES, cut_config, cut_model
from benchmarks.gpu.serving import decodes, first_tokens, saves
from megatron_hybrid.tools.plan import read_model_config
from megatron_hybrid.tools.roofline import Device

MEASURED = Bench(torch.device("cpu"), True, Device("made up", 1e9, 1e9, 0, "a test"))


def test_the_toy_run_of_all_parts(tmp_path, capsys):
    main(["--toy", "--json", str(tmp_path / "numbers.json")])
    assert "times are of the CPU at toy size" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["device"] == "CPU, toy size" and numbers["limits"] is None
    results = [*numbers["ops"], *numbers["serving"], *numbers["core_engine"]]
    assert all(result["seconds"] > 0 for result in results)
    assert all(result["bound"] is None and result["share"] is None for result in results)
    for shape in SHAPES.values():
        parts = [r["what"] for r in numbers["serving"] if r["what"].startswith(shape.name)]
        for part in ("decode step", "0 % restored", "100 % restored", "states saved", "a state "):
            assert any(part in what for what in parts)
    assert {result["others"][CORE] for result in numbers["core_engine"]} == {"needs a GPU"}


def test_where_limits_are_measured_models_have_bounds():
    model = cut_model("qwen3_next_80b_a3b", MEASURED)
    results = [
        result for part in (decodes, first_tokens, saves) for result in part(MEASURED, model)
    ]
    for result in results:
        if "states saved" not in result.what:
            assert result.bound > 0 and result.share > 0
    assert next(r for r in results if "a state restored" in r.what).goal.startswith("<= ")


def test_two_engines_in_turn():
    """A second engine of ours stands in for core's."""
    model = cut_model("nemotron_h_8b", MEASURED, "M-*-")
    sizes = Sizes(length=20, batch=2, steps=2)
    engines = [OurEngine(MEASURED, model, sizes) for _ in range(2)]
    for result in compare(MEASURED, *engines, sizes):
        assert result.seconds > 0 and result.others[CORE] > 0


@pytest.mark.parametrize("name", SHAPES)
def test_cut_models_keep_all_kinds_of_layers(name):
    whole = read_model_config(CONFIGS / f"{name}.json").layer_pattern
    for toy in (False, True):
        assert set(cut_config(name, toy).layer_pattern) == set(whole)
