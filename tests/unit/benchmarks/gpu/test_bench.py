"""Rows, timing and the device's limits, on a CPU and with a CUDA device that is made up."""

import contextlib
import itertools

import pytest
import torch

from benchmarks.gpu.bench import Bench, Row, first_line, measured_limits

CPU = Bench(torch.device("cpu"), True, None)
GPU = Bench(torch.device("cuda"), False, None)


@pytest.fixture
def cuda(monkeypatch):
    """The calls of torch.cuda that a timing makes, without a device: each replay takes 8 ms."""
    clock = itertools.count()
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, other):
            return 8.0 * (other.at - self.at)

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def capture(graph):
        calls.append("capture")
        yield

    fakes = {"Event": Event, "CUDAGraph": Graph, "graph": capture}
    fakes |= {"synchronize": lambda: None, "empty_cache": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return calls


def test_a_gpu_is_timed_by_replays_of_a_graph(cuda):
    made = []
    timing = GPU.timing(lambda: made.append(0), lambda: made.append(1))
    assert timing.by_graph and timing.seconds == 4e-3  # of a replay of two calls
    assert made[-2:] == [0, 1] and cuda.count("capture") == 1
    assert 3 <= cuda.count("replay") - 2 <= GPU.rounds
    assert timing.numbers().keys() == {"host us"}


def test_what_a_graph_cannot_hold_is_timed_by_events(cuda, monkeypatch, capsys):
    def no_capture(graph):
        raise RuntimeError("operation not permitted")

    told = []
    for by_graph in (True, False):  # a call that reads host memory is not even tried
        monkeypatch.setattr(torch.cuda, "graph", no_capture)
        timing = GPU.timing(lambda: None, by_graph=by_graph)
        assert not timing.by_graph and timing.seconds == 8e-3
        assert timing.numbers()["graph"] == "none" and "replay" not in cuda
        told.append("not permitted" in capsys.readouterr().err)
    assert told == [True, False]


def test_each_call_is_made_once_where_kernels_are_compiled():
    made = []
    bench = Bench(torch.device("cpu"), False, None, once=True)
    timing = bench.timing(lambda: made.append(0), lambda: made.append(1))
    assert made == [0, 1] and timing.seconds > 0 and bench.rounds == 1


def test_what_a_device_did_in_a_call():
    x = torch.ones(8, 8)
    activity = CPU.activity(lambda: x @ x @ x)
    (_, count, seconds), *_ = [one for one in activity.most if "mm" in one[0]]
    assert count == 2 and 0 < seconds <= activity.busy_seconds and activity.launches >= 2


def test_cells_of_a_row():
    row = Row("x", 2e-3, 1e-3, {"a": 4e-3, "b": "needs b"}, {"launches": 3}, "<= 1", "triton")
    more = "triton; launches 3; a 2.00x; b: needs b; goal <= 1"
    assert row.cells() == ("x", "2.00 ms", "50%", more)
    assert Row("x", numbers={"error": 0.001234}).cells() == ("x", "ok", "", "error 0.00123")
    assert Row("x", fault="wrong").cells() == ("x", "FAULT: wrong", "", "")
    assert row.values()["share"] == 0.5 and row.values()["cells"] == row.cells()
    assert first_line(ValueError()) == "ValueError" and first_line(ValueError("a\nb")) == "a"


def test_on_a_gpu_what_fails_is_a_row(capsys, cuda, monkeypatch):
    def rows():
        yield Row("first", 1.0)
        raise ValueError("no room\nfor it")

    first, second = GPU.guarded("second", rows())
    assert (first.what, second.what, second.fault) == ("first", "second", "no room")
    assert "ValueError" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no room"):
        list(CPU.guarded("second", rows()))

    def dead():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    found = []
    with pytest.raises(ValueError, match="no room"):
        found += GPU.guarded("second", rows())
    assert GPU.is_poisoned() and not CPU.is_poisoned()


def test_limits_are_measured():
    limits = measured_limits(CPU)
    assert limits.bandwidth > 0 and limits.flops > 0


def test_without_a_device_toy_sizes_have_to_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="--toy"):
        Bench.start(toy=False)
    assert Bench.start(toy=True).name == "CPU, toy size"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "made up")
    bench = Bench.start(toy=False, once=True)
    assert bench.is_cuda and bench.once and bench.name == "made up" and bench.limits is None
