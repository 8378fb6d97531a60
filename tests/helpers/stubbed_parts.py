"""Parts of a first run on a GPU that is not there: its kernels compile, none runs.

With arguments, those of one part. With `kept` or `others`, all parts of both calls at toy size but
fp32, odd sizes and most parts that only compile, each in a fork of this process, which has imported
everything. After each comes a line: `END`, its exit code, its title.

Autotuned kernels keep one config. With `--published` in front they keep all, and sizes are those of
published models; lengths, layers and experts are few.
"""

import contextlib
import os
import sys

import gpu_stub

IS_PUBLISHED = sys.argv[1:2] == ["--published"]


gpu_stub.install()
if not IS_PUBLISHED:
    gpu_stub.one_config()

import torch  # noqa: E402  libraries define their kernels when they are imported

from benchmarks.gpu import checks, parts  # noqa: E402
from benchmarks.gpu.bench import Bench  # noqa: E402
from benchmarks.gpu.first_run import BUDGETS, MODELS, OPS, phases  # noqa: E402
from benchmarks.gpu.ops import FAMILIES  # noqa: E402
from megatron_hybrid.inference.worker import graph_runner  # noqa: E402
from megatron_hybrid.tools.roofline import Device  # noqa: E402


class Published(Bench):
    """A CPU that takes sizes of a GPU."""

    def size(self, full, toy):
        """Of models and checks the full one, of all else, such as lengths, the small one."""
        return full if isinstance(full, dict) or full == checks.SIZES else toy


class Launched:
    """In the place of a graph: what it would replay is launched."""

    num_bytes, new_pool = 0, staticmethod(lambda: None)

    def __init__(self, run, device, pool, pieces=None):
        self.open_piece, self.steps = None, []
        with contextlib.nullcontext() if pieces is None else pieces.of(self):
            self.replay, self.output = run, run()


def zero_outputs() -> None:
    """Let what no kernel writes be zero: NaN, which may be in memory, would end requests."""
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros


def published_sizes() -> None:
    """Let all parts run so."""
    device = Device("not there", 1e15, 3e12, 80 << 30, "made up")
    Bench.start = lambda toy, once=False: Published(torch.device("cpu"), False, device, True)
    next(f for f in FAMILIES if f.op == "expert_mlps").sizes["E"] = 32


def others() -> set[str]:
    """Titles of parts of whose kind there is another one."""
    found = {f"serving {model}" for model in MODELS[1:]} | {f"compile serving {MODELS[0]}"}
    return found | {f"{what} kimi_delta_attention" for what in ("configs", "check")}


def run_all(which: str) -> None:
    """See above."""
    checks.SIZES = ("published", "toy")
    found = [part for call in BUDGETS for phase in phases(call) for part in phase]
    for part in {part.title: part for part in found}.values():
        if "fp32" in part.arguments:
            continue
        if part.name == "compile" and part.arguments[1] not in (OPS[1], MODELS[0]):
            continue
        if (part.title.removesuffix(" bf16") in others()) != (which == "others"):
            continue
        if (child := os.fork()) == 0:
            os._exit(parts.main([*part.arguments, "--toy"]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"END {code} {part.title}", flush=True)


if __name__ == "__main__":
    gpu_stub.let_backends_serve_the_cpu()
    zero_outputs()
    graph_runner.CAPTURES["cpu"] = Launched
    if IS_PUBLISHED:
        del sys.argv[1]
        published_sizes()
    if sys.argv[1:] in (["kept"], ["others"]):
        run_all(sys.argv[1])
    else:
        sys.exit(parts.main())
