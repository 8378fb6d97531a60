"""`megatron-hybrid info`: versions and use of the installed libraries."""

import importlib.metadata
import importlib.util
import platform

import torch

from megatron_hybrid import compat
from megatron_hybrid.ops import dispatch
from megatron_hybrid.version import __version__


def environment() -> dict[str, str]:
    """Versions, devices and optional libraries, for a bug report: name -> text."""
    device = "CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "megatron_hybrid": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, threads: {torch.get_num_threads()}",
        "device": device,
        "megatron-core": ".".join(map(str, compat.MEGATRON_CORE_VERSION)),
        "Transformer Engine": _transformer_engine(),
        "apex": _apex(),
        "triton": _version("triton"),
    }


def backends() -> dict[str, str]:
    """Describe for each op its usable backends, by priority, and the reasons against the others.

    Raises:
        ValueError: the environment forces a backend that no op has.
    """
    dispatch.check_forced()
    return {name: _summary(op) for name, op in sorted(dispatch.OPS.items())}


def _summary(op: dispatch.Op) -> str:
    reasons = op.refusals()
    serving = [name for name, reason in reasons.items() if reason is None]
    told = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    for backend in op.backends:
        if backend.name in serving:
            told += [f"{backend.name}: {remark}" for remark in backend.remarks()]
    return "; ".join([", then ".join(serving), *told])


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _transformer_engine() -> str:
    if not compat.have_transformer_engine():
        return "not installed: layers run on plain torch"
    return f"{_version('transformer-engine')}: used by models built on a CUDA device"


def _apex() -> str:
    if compat.have_apex():
        return "NVIDIA's, with CUDA extensions: gradient_accumulation_fusion can be used"
    if importlib.util.find_spec("apex") is not None:
        return "installed without NVIDIA's CUDA extensions: not used"
    return "not installed: gradient_accumulation_fusion cannot be used"
