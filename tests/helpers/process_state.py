"""What a process has globally: environment, warnings, logging, torch, threads, patched modules."""

import atexit
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

PATCHED = ("torch", "megatron", "transformers", "fla", "multiprocessing", "signal", "os", "socket")
"""Packages whose modules and classes are looked into for functions that were replaced."""
_CORE = "megatron.core.parallel_state"


def snapshot() -> dict[str, Any]:
    """All global state of this process that can be compared with a later snapshot, by name."""
    state: dict[str, Any] = {
        "warnings.filters": [
            (action, getattr(text, "pattern", text), kind.__name__)
            for action, text, kind, *_ in warnings.filters
        ],
        "warnings.showwarning": repr(warnings.showwarning),
        "faulthandler": faulthandler.is_enabled(),
        "locale": locale.setlocale(locale.LC_ALL),
        "umask": _umask(),
        "cwd": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.meta_path": list(map(repr, sys.meta_path)),
        "sys.path_hooks": list(map(repr, sys.path_hooks)),
        "sys.hooks": [repr(getattr(sys, n)) for n in ("excepthook", "unraisablehook", "stdout")],
        "threading.excepthook": repr(threading.excepthook),
        "sys.recursionlimit": sys.getrecursionlimit(),
        "sys.switchinterval": sys.getswitchinterval(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0, repr(gc.callbacks)],
        "atexit": atexit._ncallbacks(),
        "multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "children": sorted(process.name for process in multiprocessing.active_children()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "rng.torch": hash(torch.get_rng_state().numpy().tobytes()),
        "rng.numpy": hash(np.random.get_state()[1].tobytes()),
        "rng.random": hash(random.getstate()),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.default_device": str(torch.get_default_device()),
        "torch.grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "torch.anomaly": torch.is_anomaly_enabled(),
        "torch.threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch.deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch.matmul_precision": torch.get_float32_matmul_precision(),
        "torch.printing": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "torch.sharing": torch.multiprocessing.get_sharing_strategy(),
        "torch.flags": repr(_flags()),
        "torch.modes": torch._C._len_torch_function_stack(),
        "torch.distributed": [dist.is_initialized(), sorted(dist.Backend.backend_list)],
        "torch.distributed.groups": len(dist.distributed_c10d._world.pg_map),
    }
    state |= {f"env.{name}": value for name, value in os.environ.items()}
    for number in signal.valid_signals():
        state[f"signal.{number}"] = repr(signal.getsignal(number))
    for name, logger in [("root", logging.getLogger()), *logging.Logger.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            state[f"logging.{name}"] = [
                logger.level, logger.disabled, logger.propagate,
                *(type(each).__name__ for each in (*logger.handlers, *logger.filters)),
            ]  # fmt: skip
    state["logging.disable"] = logging.root.manager.disable
    for name in ("torch._dynamo.config", "torch._inductor.config"):
        if module := sys.modules.get(name):
            state[name] = hash(repr(sorted(module.get_config_copy().items())))
    if core := sys.modules.get(_CORE):
        state |= {
            f"core.{name}": type(value).__name__ if value is not None else None
            for name, value in vars(core).items()
            if name.startswith("_") and name.isupper()
        }
    if core_random := sys.modules.get("megatron.core.tensor_parallel.random"):
        tracker = core_random._CUDA_RNG_STATE_TRACKER
        state["core.rng"] = tracker and sorted(tracker.get_states())
    return state | _modules()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def _flags() -> list[Any]:
    found = []
    for name in ("cuda.matmul", "cudnn", "mkldnn", "opt_einsum"):
        owner: Any = torch.backends
        for part in name.split("."):
            owner = getattr(owner, part)
        for flag in ("allow_tf32", "benchmark", "deterministic", "enabled", "strategy"):
            found.append((name, flag, getattr(owner, flag, None)))
    return found


def _modules() -> dict[str, Any]:
    """Functions of other packages and of their classes, by identity; modules without a file, which
    may stand in for others. What a module lacks before it is imported counts as unchanged."""
    state: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("triton._C") or not isinstance(module, types.ModuleType):
            continue
        if getattr(module, "__spec__", None) is None and name != "__main__":
            state[f"stand-in.{name}"] = type(module).__name__
        if name.split(".")[0] not in PATCHED:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
                state[f"function.{name}.{attribute}"] = id(value)
            elif isinstance(value, type) and value.__module__ == name:
                for method, function in list(vars(value).items()):
                    if isinstance(function, types.FunctionType | classmethod | staticmethod):
                        state[f"function.{name}.{attribute}.{method}"] = id(function)
    return state


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(before, after) of each name that differs. Modules and loggers that are new are no change;
    new loggers are, once they have a level or a handler."""
    missing = object()
    found = {}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, missing), after.get(name, missing)
        if old is missing:
            if name.startswith(("function.", "core.", "torch._")):
                continue
            if name.startswith("logging.") and new == [0, False, True]:
                continue
        if old != new:
            found[name] = (None if old is missing else old, None if new is missing else new)
    return found
