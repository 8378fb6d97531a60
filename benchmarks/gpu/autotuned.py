"""Triton's autotuned kernels in configs that somebody chose, in place of the fastest ones."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from triton.runtime.autotuner import Autotuner, Config
    from triton.runtime.jit import JITFunction

COMPILERS = 4
"""Threads."""


class NoFit(Exception):
    """A kernel has none of the given configs on this device or for this input, as where its shared
    memory is too small: an autotuner leaves such configs out."""


class Chosen:
    """The configs that autotuned kernels run in: see `chosen`."""

    def __init__(self, compiles_all: bool) -> None:
        self.of: dict[str, Config] = {}
        """Kernel -> its one config. The others run in the simplest config that fits."""
        self.found: dict[str, list[Config]] = {}
        """Kernel that has run -> the configs it may have for what it ran on, simplest first."""
        self.launched: dict[str, str] = {}
        """Kernel -> the last config it was launched in, of all that Triton launched."""
        self._compiles_all = compiles_all
        self._compiled: set[tuple] = set()

    def run(self, kernel: Autotuner, run: Callable, args: tuple, kwargs: dict) -> Any:
        """Stand in for an autotuner's `run`."""
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime.errors import OutOfResources, PTXASError

        name = kernel.base_fn.__name__
        kernel.nargs = dict(zip(kernel.arg_names, args))
        self.found[name] = usable = sorted(kernel.prune_configs(kwargs), key=_risk)
        if self._compiles_all:
            named = {**kernel.nargs, **kwargs}
            dtypes = [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
            key = (name, *(named.get(key) for key in kernel.keys), *dtypes)  # as autotuners have it
            if key not in self._compiled:
                self._compiled.add(key)
                _compile(kernel, usable, args, kwargs)
        failure, whole = None, kernel.configs
        for config in [self.of[name]] if name in self.of else usable:
            kernel.configs = [config]  # of one config no time is taken
            try:
                return run(kernel, *args, **kwargs)
            except (OutOfResources, CompileTimeAssertionFailure, PTXASError) as error:
                failure = error
            finally:
                kernel.configs = whole
        raise NoFit(str(failure)) from failure

    def launch(self, function: JITFunction, run: Callable, args: tuple, kwargs: dict) -> Any:
        """Stand in for a kernel's `run`."""
        if not kwargs["warmup"]:
            names = [k for k in kwargs if k.startswith("B") or k in ("num_warps", "num_stages")]
            words = [f"{k}={kwargs[k]}" for k in names if isinstance(kwargs[k], int)]
            self.launched[function.__name__] = " ".join(words)
        return run(function, *args, **kwargs)


def _compile(kernel: Autotuner, configs: list[Config], args: tuple, kwargs: dict) -> None:
    """Compile a kernel in several threads, which wait for the compiler without Python's lock."""
    from triton import AsyncCompileMode

    with (
        ThreadPoolExecutor(COMPILERS) as executor,
        AsyncCompileMode(executor, ignore_errors=True),
    ):
        for config in configs:
            kernel.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())


def _risk(config: Config) -> tuple:
    """Order configs by risk. What compilers got wrong are products that groups of 4 warps share, in
    a loop with stages: configs without them first, then few stages, warps and elements."""
    sizes = [value for value in config.kwargs.values() if isinstance(value, int)]
    is_shared = config.num_stages > 1 and config.num_warps % 4 == 0
    return is_shared, config.num_stages, config.num_warps, math.prod(sizes)


def described(config: Config) -> str:
    """Describe it in the words of a table."""
    sizes = [f"{name}={value}" for name, value in config.kwargs.items()]
    return " ".join([*sizes, f"warps={config.num_warps}", f"stages={config.num_stages}"])


def left_out(name: str) -> list[Config]:
    """Configs of a kernel that our ops leave out on this device: see `ops/hopper.py`."""
    from megatron_hybrid.ops import hopper

    found = [its for kernel, its in hopper.left_out.items() if kernel.base_fn.__name__ == name]
    return [config for its in found for config in its]


@contextmanager
def chosen(compiles_all: bool = False) -> Iterator[Chosen]:
    """Let no autotuner of Triton take times: kernels run in the configs that are chosen for them.

    Args:
        compiles_all: compile all configs before a kernel runs in one, so that it can be tuned in a
            short time later.
    """
    choice = Chosen(compiles_all)
    if importlib.util.find_spec("triton") is None:
        yield choice
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run, launch = Autotuner.run, JITFunction.run

    def run_chosen(kernel, *args, **kwargs):
        return choice.run(kernel, run, args, kwargs)

    def launch_noted(function, *args, **kwargs):
        return choice.launch(function, launch, args, kwargs)

    with (
        mock.patch.object(Autotuner, "run", run_chosen),
        mock.patch.object(JITFunction, "run", launch_noted),
    ):
        yield choice
