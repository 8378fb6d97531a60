"""What measures a GPU, at toy size on a CPU: the code runs, and claims no more."""

import json
from importlib.metadata import version

import pytest
import torch
from matrix import matrix_rows

from benchmarks.gpu import parts
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.first_run import MARK
from benchmarks.gpu.models import CONFIGS, SHAPES, cut_config
from megatron_hybrid.tools.plan import read_model_config
from megatron_hybrid.tools.roofline import Device

MEASURED = Bench(torch.device("cpu"), True, Device("made up", 1e9, 1e9, 0, "a test"))


def rows_of(capsys, *arguments):
    assert parts.main([*arguments, "--toy"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    rows = [json.loads(line.removeprefix(MARK)) for line in lines]
    assert all(row["device"] == "CPU, toy size" and row["fault"] == "" for row in rows)
    assert all(row["bound"] is None and row["share"] is None for row in rows)
    return rows


@pytest.mark.parametrize("name", matrix_rows(SHAPES, "nemotron_h_8b", "qwen3_5_4b"))
def test_the_toy_run_of_a_model(name):
    """Where limits are measured, its rows have bounds."""
    rows = list(parts.PARTS["serving"](MEASURED, name))
    assert all(row.what.startswith(SHAPES[name].name) and row.seconds > 0 for row in rows)
    for part in ("decode step", "0 % restored", "100 % restored", "states saved", "a state "):
        assert any(part in row.what for row in rows)
    for row in rows:
        has_bound = not any(part in row.what for part in ("states saved", "most busy"))
        assert (row.bound is not None) is (row.share is not None) is has_bound
    assert next(row for row in rows if "a state restored" in row.what).goal.startswith("<= ")
    decode = next(row for row in rows if "decode step" in row.what)
    assert decode.numbers["launches"] > 0 and decode.numbers["busy ms"] > 0


def test_the_environment_of_a_cpu(capsys):
    versions, *_, ops = rows_of(capsys, "environment")
    assert versions["numbers"]["torch"] == version("torch")
    assert ops["numbers"]["reference"] == "usable"


@pytest.mark.parametrize("name", SHAPES)
def test_cut_models_keep_all_kinds_of_layers(name):
    whole = read_model_config(CONFIGS / f"{name}.json").layer_pattern
    for cut in ({"toy": False}, {"toy": True}, {"toy": False, "few": True}):
        # What stands behind "/" is left out.
        kinds = set(whole.partition("/")[0])
        assert set(cut_config(name, **cut).layer_pattern) == kinds
