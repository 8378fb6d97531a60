"""Launches: a kernel is given tensors that lie as it takes them, and launched in no other way."""

import ast
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_hybrid
from megatron_hybrid.ops.launch import Kernel, checked

PACKAGE = Path(megatron_hybrid.__file__).parent
LIBRARIES = ("fla.", "megatron.core.ssm")
"""Packages with other projects' kernels."""


class Compiled:
    """In the place of what `triton.jit` makes of a function: a launch is noted."""

    def __init__(self, fn):
        self.fn, self.launched = fn, None

    def __getitem__(self, grid):
        return lambda *inputs, **constants: setattr(self, "launched", (grid, inputs, constants))


class Elsewhere(torch.Tensor):
    """On the first GPU."""

    def get_device(self):
        return 0


def toy(
    x_ptr,
    places_ptr,
    sums_ptr,
    bias_ptr,
    gate_ptr,
    rows,
    stride_x_row,
    stride_x_head,
    stride_gate_row,
    H: "tl.constexpr",  # noqa: F821
):
    """It is never run."""


def tensors():
    """What the toy takes, in 3 programs, of 4 rows, with 2 heads."""
    return {
        "x": torch.zeros(4, 5, 6)[:, 1:3],
        "places": torch.arange(4),
        "sums": torch.zeros(3, 2, 6),
        "bias": torch.zeros(2, dtype=torch.float16),
        "gate": torch.zeros(9, 3, 7)[::2][:4],
    }


def launch(**changed):
    compiled = Compiled(toy)
    Kernel(compiled)((3, 2), list((tensors() | changed).values()), (4,), H=2)
    return compiled.launched


def test_a_kernel_is_told_the_strides_that_may_be_any():
    grid, inputs, constants = launch()
    assert grid == (3, 2) and constants == {"H": 2}
    assert inputs[5:] == (4, 30, 6, 42)
    _, inputs, _ = launch(bias=None, gate=None)
    assert inputs[3:] == (None, None, 4, 30, 6, 0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("places", torch.ones(1, dtype=torch.int32).expand(4)),  # of stride 0
        ("places", torch.arange(8)[::2]),
        ("places", torch.arange(4).as_subclass(Elsewhere)),
        ("x", torch.zeros(4, 2, 6, 2)[..., 0]),  # rows, but of no neighbours
        ("x", torch.zeros(4)),  # fewer dimensions than strides
        ("x", torch.zeros(4, 2, 6, dtype=torch.float64)),
        ("x", torch.empty_strided((4, 2, 6), (12, 1 << 31, 1))),  # offsets beyond int32
        ("sums", torch._neg_view(torch.zeros(3, 2, 6))),
        ("bias", torch.zeros(1).expand(2)),
        ("gate", torch.zeros(4, 3, 7).mT),
    ],
)
def test_what_a_kernel_would_read_wrongly_is_not_launched(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} of toy is .*; it takes .*contiguous\(\)"):
        launch(**{name: wrong})


def test_sizes_of_one_may_have_any_stride():
    launch(x=torch.zeros(4, 2, 6).as_strided((4, 2, 6), (12, 6, 1)))
    one = torch.zeros(40).as_strided((4, 3, 1), (3, 1, 9))
    assert launch(gate=one)[1][-1] == 3


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    strides=st.lists(st.sampled_from((0, 1, 2, 3, 6, 9)), min_size=4, max_size=4),
    first=st.integers(0, 3),
)
def test_neighbours_are_what_a_kernel_counts_on(shape, strides, first):
    """Numbers in the dimensions without strides lie one behind the other."""
    first = min(first, len(shape) - 1)
    x = torch.arange(200.0).as_strided(shape, strides[: len(shape)])
    used = x[(0,) * first].flatten()
    function = checked(lambda x: "taken", x=first)
    if torch.equal(used, torch.arange(float(len(used)))):
        assert function(x) == "taken"
    else:
        with pytest.raises(ValueError, match=r"^x of <lambda> is "):
            function(x)


def test_each_tensor_of_a_library_is_checked():
    function = checked(lambda x, table=None, size=1: (x, table, size), x=2)
    assert function(torch.zeros(2, 6)[:, ::2], size=4)[2] == 4
    with pytest.raises(ValueError, match=r"^table of <lambda> is "):
        function(torch.zeros(2, 3), table=torch.zeros(4)[::2])


def test_no_kernel_is_launched_without_a_check():
    """`function[grid](...)` stands in one place; what `triton.jit` compiles is called by kernels;
    functions of libraries that launch kernels are called through `checked`."""
    launches, without, bare, outside = [], [], [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        own, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if not own.startswith("ops/"):
            outside += [own] * bool(re.search(r"^ *(import|from) (triton|fla)\b", text, re.M))
        if not own.startswith("ops/") or path.stem == "reference":
            continue
        tree = ast.parse(text)
        called = {node.func.id for node in ast.walk(tree) if is_call_of_name(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launches.append(own)
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names = [ast.unparse(one).partition("(")[0] for one in node.decorator_list]
                if "triton.jit" in names and names[0] != "Kernel":
                    without.append(f"{own}: {node.name}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
                names = {alias.asname or alias.name for alias in node.names}
                bare += [f"{own}: {name}" for name in sorted(names & called)]
    assert launches == ["ops/launch.py"] and [*without, *bare, *outside] == []


def is_call_of_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
