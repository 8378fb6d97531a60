"""`megatron-hybrid info`: versions and use of the installed libraries."""

import importlib.metadata
import platform

import torch

from megatron_hybrid import compat
from megatron_hybrid.ops import dispatch
from megatron_hybrid.version import __version__


def environment() -> dict[str, str]:
    """Describe versions, devices and optional libraries for a bug report: name -> text."""
    device = "CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "megatron_hybrid": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, threads: {torch.get_num_threads()}",
        "device": device,
        "megatron-core": ".".join(map(str, compat.MEGATRON_CORE_VERSION)),
        **_accelerators(),
        "triton": _version("triton"),
    }


def backends() -> dict[str, str]:
    """Describe for each op its usable backends, in order, and the reasons against the others.

    Raises:
        ValueError: the environment forces a backend that no op has.
    """
    dispatch.check_forced()
    return {name: _summary(op) for name, op in sorted(dispatch.OPS.items())}


def _summary(op: dispatch.Op) -> str:
    reasons = op.refusals()
    serving = [name for name, reason in reasons.items() if reason is None]
    refusing: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            refusing.setdefault(reason, []).append(name)
    told = [f"{', '.join(names)}: {reason}" for reason, names in refusing.items()]
    for backend in op.backends:
        if backend.name in serving:
            told += [f"{backend.name}: {remark}" for remark in backend.remarks()]
    return "; ".join([", then ".join(serving), *told])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_USES = {
    "transformer_engine.pytorch": ("Transformer Engine", "layers on CUDA, and the optimizer"),
    "apex.optimizers": ("apex", "the optimizer, without Transformer Engine"),
    "amp_C": ("apex, amp_C", "norms of gradients, without Transformer Engine"),
    "fused_weight_gradient_mlp_cuda": ("apex, gradients", "gradient_accumulation_fusion"),
}
"""Module -> its name here, and what it is used for."""


def _accelerators() -> dict[str, str]:
    """Say of each module of Transformer Engine and apex what it is used for, or why not."""
    told, reasons = {}, compat.unused_accelerators()
    for module, (name, use) in _USES.items():
        reason = reasons[module]
        told[name] = f"used for {use}" if reason is None else f"not used: {reason}"
    return told
