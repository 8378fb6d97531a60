"""Launches: a kernel is given tensors that fit its contracts, and is launched in no other way."""

import ast
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_hybrid
from megatron_hybrid.ops.launch import checked, kernel

PACKAGE = Path(megatron_hybrid.__file__).parent
LIBRARIES = ("fla", "megatron.core.ssm")
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


CONTRACTS = {
    **{"x": "rows H | P", "places": "int programs+1", "sums": "fp32 programs 2 P"},
    **{"bias": "H or None", "gate": "rows | ... or None"},
}


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
    own = kernel(**CONTRACTS)(compiled)
    own((3, 2), list((tensors() | changed).values()), (4,), H=2)
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
        ("places", torch.arange(3)),
        ("places", torch.arange(5)),
        ("places", torch.arange(4).view(1, 4)),
        ("places", torch.zeros(4)),
        ("places", torch.arange(4).as_subclass(Elsewhere)),
        ("places", None),
        ("x", torch.zeros(4, 2, 6, 2)[..., 0]),  # rows, but of no neighbours
        ("x", torch.zeros(3, 2, 6)),  # fewer rows than a number of the launch
        ("x", torch.zeros(4, 3, 6)),  # more heads than a constant
        ("x", torch.zeros(4, 2, 6, dtype=torch.float64)),
        ("x", torch.empty_strided((4, 2, 6), (12, 1 << 31, 1))),  # offsets beyond int32
        ("sums", torch.zeros(3, 2, 6).half()),
        ("sums", torch.zeros(3, 2, 7)),  # wider than x
        ("sums", torch.zeros(3, 3, 6)),
        ("bias", torch.zeros(1).expand(2)),
        ("gate", torch.zeros(4, 3, 7).mT),
        ("gate", torch.zeros(4, 3, 7, dtype=torch.int32)),
    ],
)
def test_what_a_kernel_would_read_wrongly_is_not_launched(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} of toy is .*; it takes '[^\n]*contiguous\(\)"):
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
    words = ["any"] * len(shape)
    contract = " ".join([*words[:first], "|", *words[first:]]) if first else " ".join(words)
    used = x[(0,) * first].flatten()
    function = checked(lambda x: "taken", x=contract)
    if torch.equal(used, torch.arange(float(len(used)))):
        assert function(x) == "taken"
    else:
        with pytest.raises(ValueError, match=r"^x of <lambda> is "):
            function(x)


@pytest.mark.parametrize("changed", [{"x": "rows | H P"}, {"gate": "rows H | P"}, {"bias": None}])
def test_contracts_have_the_strides_of_the_signature(changed):
    contracts = {name: text for name, text in (CONTRACTS | changed).items() if text}
    with pytest.raises(TypeError, match=r"toy has the arguments .*: adapt one of them"):
        kernel(**contracts)(Compiled(toy))


def test_each_tensor_of_a_library_has_a_contract():
    function = checked(lambda x, table=None, size=1: (x, table, size), x="any any |")
    assert function(torch.zeros(2, 3), size=4)[2] == 4
    with pytest.raises(TypeError, match="table of <lambda> has no contract: declare one"):
        function(torch.zeros(2, 3), torch.zeros(2))


def test_no_kernel_is_launched_outside_of_its_contracts():
    """`function[grid](...)` stands in one place; what `triton.jit` compiles is called by kernels,
    or has contracts; functions of libraries that launch kernels are called through `checked`."""
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
                if "triton.jit" in names and names[0] != "kernel":
                    without.append(f"{own}: {node.name}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
                names = {alias.asname or alias.name for alias in node.names}
                bare += [f"{own}: {name}" for name in sorted(names & called)]
    assert launches == ["ops/launch.py"] and [*without, *bare, *outside] == []


def is_call_of_name(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
