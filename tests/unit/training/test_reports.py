"""Reports of a run: means between two of them, the log, its continuation after a stop, the
terminal, tensorboard, the plot."""

import io
import json
import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from small_models import small_model
from stock_megatron import core_groups
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_hybrid.models.flops import training_flops
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.measures import Measures
from megatron_hybrid.training.reports import (
    LOG,
    ReportFields,
    Reports,
    plot_losses,
    read_log,
    terminal_line,
)


def reports(folder, step=0, **fields):
    console = Console(file=io.StringIO())
    recipe = {"tokenizer": "demo", "run": {"steps": 20}}
    return Reports(folder, ReportFields.of("reports", fields), 20, step, recipe, console)


def write(one, *steps):
    for step in steps:
        one.write(step, loss=1 / step, tokens=10 * step)
    one.close()


def steps_of(folder):
    return [record["step"] for record in read_log(folder / LOG)]


def test_a_step_is_a_line_of_the_log_and_of_the_terminal(tmp_path):
    one = reports(tmp_path)
    write(one, 1, 2)
    lines = (tmp_path / LOG).read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"step": 1, "loss": 1.0, "tokens": 10},
        {"step": 2, "loss": 0.5, "tokens": 20},
    ]
    assert one.console.file.getvalue() == "step 1  loss 1.0000\nstep 2  loss 0.5000\n"


def test_the_log_is_cut_behind_the_step_that_is_taken_up(tmp_path):
    write(reports(tmp_path), 1, 2, 3, 4)
    write(reports(tmp_path, step=2), 3)
    assert steps_of(tmp_path) == [1, 2, 3]
    write(reports(tmp_path))
    assert steps_of(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [LOG]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_last_line_that_is_half_written_is_left_out(tmp_path, cut):
    write(reports(tmp_path), 1, 2, 3)
    path = tmp_path / LOG
    path.write_text(path.read_text()[: -1 - cut])
    assert steps_of(tmp_path) == [1, 2]
    write(reports(tmp_path, step=2), 3, 4)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("broken", ["", '{"step": 3, "lo', "\0" * 40, "\xff\xfe"])
def test_a_line_that_is_no_json_takes_no_other_with_it(tmp_path, broken):
    write(reports(tmp_path), 1, 2, 3)
    first, *others = (tmp_path / LOG).read_text().splitlines()
    text = "\n".join([first, broken, *others, ""])
    (tmp_path / LOG).write_text(text, encoding="latin-1")
    write(reports(tmp_path, step=3), 4)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ["[1]", '{"step": "4"}', '{"loss": 1.0}', '{"step": 1e99}'])
def test_json_that_is_no_report_is_refused_with_its_place(tmp_path, line):
    write(reports(tmp_path), 1)
    with open(tmp_path / LOG, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"{LOG}:2(: step)? is .*; it must be a"):
        reports(tmp_path, step=1)


def test_what_is_not_finite_is_null_in_the_log(tmp_path):
    one = reports(tmp_path)
    one.write(1, loss=math.nan, gradient_norm=math.inf, tokens=3)
    text = (tmp_path / LOG).read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record == {"step": 1, "loss": None, "gradient_norm": None, "tokens": 3}


# As on eight GPUs.
MEASURED = {
    "loss": 2.34567,
    "tokens_per_second": 1234567.8,
    "tflops_per_rank": 448.0,
    "load_balancing_loss": 1.02,
    "flops_utilisation": 0.4531,
    "gradient_norm": 0.1234,
    "learning_rate": 2.9815e-4,
    "tokens": 10**9,
    "samples": 10**6,
    "skipped_steps": 0,
}


@pytest.mark.parametrize(("skipped", "end"), [(0, ""), (3, "  3 skipped")])
def test_a_line_has_what_is_read_most(skipped, end):
    line = "step 120000  loss 2.3457  grad 0.12  lr 2.98e-04  1.23M tokens/s  45.3% of peak"
    assert terminal_line(120000, {**MEASURED, "skipped_steps": skipped}) == line + end


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tflops_per_rank", 1234.5, "1234 TFLOP/s"),
        ("tflops_per_rank", 45.67, "45.7 TFLOP/s"),
        ("tflops_per_rank", 1.0, "1.00 TFLOP/s"),
        ("tflops_per_rank", 0.9996, "1000 GFLOP/s"),
        ("tflops_per_rank", 0.00123, "1.23 GFLOP/s"),
        ("tokens_per_second", 71.4, "71 tokens/s"),
        ("tokens_per_second", 99999.4, "99,999 tokens/s"),
        ("tokens_per_second", 123456.0, "123k tokens/s"),
        ("tokens_per_second", 999600.0, "1M tokens/s"),
        ("eval_loss", 2.5, "eval 2.5000"),
        ("gradient_norm", 1.9, "grad 1.90"),
        ("gradient_norm", 0.0123, "grad 1.2e-02"),
        ("gradient_norm", 12345.0, "grad 1.2e+04"),
    ],
)
def test_a_line_has_short_numbers(name, value, text):
    assert terminal_line(3, {name: value, "tokens": 4}) == f"step 3  {text}"


def test_numbers_go_to_tensorboard(tmp_path):
    first = reports(tmp_path, writers=["tensorboard"])
    for step in (4, 5):
        first.write(step, loss=2.0)
    first.close()
    resumed = reports(tmp_path, step=4, writers=["tensorboard"])
    resumed.write(5, loss=1.5, gradient_norm=math.nan)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]  # a norm that is not finite is no number
    # A run that goes on replaces the steps behind its checkpoint.
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 2.0), (5, 1.5)]


def tracker_of(runs, params, ended):
    """Stands in for the packages wandb and mlflow: each of their runs has an id and rows, but for
    step 7."""

    def note(id, row):
        if row["step"] == 7:
            raise ZeroDivisionError
        runs.setdefault(id, []).append(row)

    def init(id, resume, **shown):
        nothing = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(log=partial(note, id), define_metric=nothing, finish=end)

    def start_run(id, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=id or f"id {len(runs)}"))

    def log_metrics(values, step, run_id):
        note(run_id, {"step": step, **values})

    end, log = partial(ended.append, 1), {"log_params": params.append, "log_metrics": log_metrics}
    return SimpleNamespace(init=init, start_run=start_run, end_run=end, **log)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_goes_on_in_the_same_run_of_its_tracker(tmp_path, monkeypatch, name):
    runs, params, ended = {}, [], []
    monkeypatch.setitem(sys.modules, name, tracker_of(runs, params, ended))
    first = reports(tmp_path, writers=[name])
    first.write(4, loss=2.0)
    first.write(4, eval_loss=3.0)
    write(first, 5)
    assert ended == [1]
    resumed = reports(tmp_path, step=4, writers=[name])
    resumed.write(5, loss=1 / 5, tokens=50)  # sent before the kill
    resumed.write(6, loss=1.0, gradient_norm=math.nan)
    rows = [{"step": 4, "loss": 2.0}, {"step": 4, "eval_loss": 3.0}]
    rows += [{"step": 5, "loss": 1 / 5, "tokens": 50}, {"step": 6, "loss": 1.0}]
    assert params == [{"tokenizer": "demo", "run.steps": "20"}] * (name == "mlflow")
    write(resumed, 7, 8)  # a run does not end for want of its tracker
    assert list(runs.values()) == [rows]
    assert steps_of(tmp_path) == [4, 4, 5, 6, 7, 8]
    assert resumed.console.file.getvalue().count(f"{name} is left out from now on: Zero") == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_without_a_package_the_remedy_is_told(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        reports(tmp_path, writers=[name])


def test_a_tracker_that_does_not_start_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=None))
    with pytest.raises(OSError, match=r"'wandb', which does not start: .*set WANDB_MODE=offline"):
        reports(tmp_path, writers=["wandb"])


def test_losses_are_plotted_against_tokens(tmp_path, monkeypatch):
    import matplotlib.figure

    drawn = []
    plot = matplotlib.axes.Axes.plot

    def note(axes, xs, ys, **style):
        drawn.append((style["label"], list(xs), list(ys)))
        return plot(axes, xs, ys, **style)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", note)
    one = reports(tmp_path)
    one.write(1, loss=3.0, tokens=1e6)
    one.write(2, loss=math.nan, tokens=2e6)
    one.write(2, eval_loss=2.5, tokens=2e6)
    plot_losses(tmp_path, tmp_path / "plot.png")
    assert drawn == [("training", [1.0], [3.0]), ("validation", [2.0], [2.5])]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def batch(*lengths):
    size = sum(lengths)
    tokens = torch.zeros(1, size, dtype=torch.int64)
    return Batch(tokens, tokens, torch.ones(1, size), list(lengths))


@pytest.fixture(autouse=True)
def groups():
    core_groups()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that `time.perf_counter` tells."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_speed_is_of_all_tokens_and_work_of_full_attention_grows_with_a_sequence(clock):
    model = small_model("M*")
    of_token, of_pair = training_flops(model)
    measures = Measures(model, peak_tflops=2e-6)
    measures.count_batch(batch(6, 2))
    clock[0] = 2.0
    values = measures.take()
    assert values["tokens_per_second"] == 4
    flops = 8 * of_token + (6 * 6 / 2 + 2 * 2 / 2) * of_pair
    assert values["tflops_per_rank"] == pytest.approx(flops / 2 / 1e12)
    assert values["flops_utilisation"] == pytest.approx(flops / 2 / 2e6)


def test_the_loss_is_that_of_a_token_and_leaves_out_what_is_not_finite():
    measures = Measures(small_model("M"))
    for loss, labels in ((1.0, 30), (math.nan, 40), (2.0, 10)):
        measures.add_step({"loss": (loss * labels, labels)})
    assert measures.take()["loss"] == pytest.approx(1.25)
    assert math.isnan(measures.take()["loss"])  # each call begins anew


def test_there_is_no_utilisation_of_an_unknown_device():
    assert "flops_utilisation" not in Measures(small_model("M")).take()
