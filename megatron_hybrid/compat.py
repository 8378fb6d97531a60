"""All differences between the tested megatron-core releases (0.16.1 and 0.19.x), in one file.

The rest of the package imports this module before any other part of megatron-core, so a broken or
missing installation is explained once, here. `models/__init__.py` imports it first; other packages
import from here the parts of megatron-core that they use.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Literal

import torch

_OLDEST, _FIRST_UNTESTED = (0, 16, 1), (0, 20, 0)


def _check_version(version: tuple[int, ...]) -> None:
    """Raise ImportError for a release that is too old, and warn of one that is not tested yet."""
    if _OLDEST <= version < _FIRST_UNTESTED:
        return
    found = f"megatron-core {'.'.join(map(str, version))} is installed; megatron_hybrid"
    if version < _OLDEST:
        raise ImportError(
            f"{found} needs 0.16.1 or newer. Run `pip install 'megatron-core>=0.16.1'`."
        )
    warnings.warn(
        f"{found} is tested with 0.16.1 up to 0.19.x. Newer releases are not refused; if this one "
        "fails, run `pip install 'megatron-core<0.20'`.",
        stacklevel=2,
    )


def compile_at_first_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.compile` as a decorator that compiles a function when it is first called, and
    loads torch's compiler no sooner.

    compile_now: `torch.compile`, which gets other objects than plain functions at once.
    """

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Inside of a function that is being compiled, it is a part of that one.
            function = model if torch.compiler.is_compiling() else compiled()
            return function(*args, **kwargs)

        return call

    return compile_later


@contextmanager
def _compiled_at_first_call() -> Iterator[None]:
    """Let core take `compile_at_first_call` for `torch.compile` when it is imported and decorates
    fused functions (`jit_fuser`). Else torch's compiler is loaded, 3 of 9 seconds of an import."""
    before = torch.compile
    torch.compile = compile_at_first_call(before)
    try:
        yield
    finally:
        torch.compile = before


_ACCELERATORS = {
    "apex.optimizers": ("apex.optimizers:FusedAdam", "apex.optimizers:FusedSGD"),
    "amp_C": (
        "amp_C:multi_tensor_l2norm",
        "amp_C:multi_tensor_scale",
        "apex.multi_tensor_apply:multi_tensor_applier",
    ),
    "fused_weight_gradient_mlp_cuda": (
        "fused_weight_gradient_mlp_cuda:wgrad_gemm_accum_fp32",
        "fused_weight_gradient_mlp_cuda:wgrad_gemm_accum_fp16",
    ),
    "apex.contrib": ("apex.contrib.layer_norm.layer_norm:",),
    "apex.normalization": ("apex.normalization.fused_layer_norm:",),
    "transformer_engine.pytorch": ("transformer_engine.pytorch:",),
}
"""Part of NVIDIA's Transformer Engine or apex that megatron-core imports if it exists -> the names
that core takes from it."""


def _try_accelerators() -> dict[str, str]:
    """Import the accelerators before megatron-core does, which expects only ImportError of a broken
    one. Hide those that fail, or that core fails with, and return part -> the reason."""
    reasons, hidden, before = {}, {}, set(sys.modules)
    for name, needed in _ACCELERATORS.items():
        for each in needed:
            module = each.partition(":")[0]
            package = module.partition(".")[0]
            try:
                if importlib.util.find_spec(package) is None:
                    reasons[name] = hidden.get(package, f"{package} is not installed")
                    break
                pkgutil.resolve_name(each)
                if package == "transformer_engine":  # old ones lack what core imports unguarded
                    importlib.import_module("megatron.core")
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # builds for another CUDA or torch; some call sys.exit
                reasons[name] = f"{package} is installed, but {type(error).__name__}: {error}"
                failed = module if package == "apex" and "apex" in sys.modules else package
                for loaded in sys.modules.keys() - before:
                    if loaded.startswith((f"{failed}.", "megatron.core")):
                        del sys.modules[loaded]
                hidden[failed], sys.modules[failed] = reasons[name], None
                break
    return reasons


# torch logs about a CUDA toolkit on machines without a GPU, such as login nodes.
_torch_extensions = logging.getLogger("torch.utils.cpp_extension")
_torch_extensions.addFilter(_silent := lambda record: False)
try:
    with warnings.catch_warnings(), _compiled_at_first_call():
        # megatron-core warns of every missing GPU library; ours are reported when they are needed.
        warnings.simplefilter("ignore")
        _UNUSED = _try_accelerators()
        import megatron.core
    # Before the imports that may fail in another release.
    MEGATRON_CORE_VERSION: tuple[int, int, int] = tuple(megatron.core.package_info.VERSION[:3])
    """(major, minor, patch) of the installed megatron-core."""
    _check_version(MEGATRON_CORE_VERSION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.backends
        import megatron.core.models.common.language_module.language_module
        from megatron.core import activations as activations
        from megatron.core import parallel_state as parallel_state
        from megatron.core.transformer import MLATransformerConfig as MLATransformerConfig
        from megatron.core.transformer import TransformerConfig as TransformerConfig
except ModuleNotFoundError as error:
    # 0.18 and later import triton unguarded in transformer/moe/ops/paged_stash.py.
    if error.name is not None and error.name.split(".")[0] == "triton":
        raise ImportError(
            "this megatron-core imports `triton` as soon as it is imported (every release from "
            "0.18 on does), and triton is not installed. Run `pip install triton` (the wheel also "
            "imports on a machine without a GPU), or use `pip install megatron-core==0.16.1`."
        ) from error
    if error.name in ("megatron", "megatron.core"):
        raise ImportError(
            "megatron_hybrid is built on megatron-core, which is not installed. "
            "Run `pip install 'megatron-core>=0.16.1'`."
        ) from error
    raise
finally:
    _torch_extensions.removeFilter(_silent)


def _keep_given_groups() -> None:
    """Let core's layers keep the group that they are given if torch.distributed is not initialized.
    Core drops the group then, and its next line asks None for its size. Calls without a group stay
    as they are."""
    name = "get_tensor_model_parallel_group_if_none"
    core = getattr(megatron.core.utils, name)

    @functools.wraps(core)
    def given_or_core(tp_group: Any, *args: Any, **kwargs: Any) -> Any:
        return core(tp_group, *args, **kwargs) if tp_group is None else tp_group

    for path, module in list(sys.modules.items()):
        if path.startswith("megatron.core.") and getattr(module, name, None) is core:
            setattr(module, name, given_or_core)


_keep_given_groups()


def replace_deprecated_defaults(config: TransformerConfig) -> None:
    """Write a default that core warns about, at every config made, in the form that it asks for."""
    field = "cuda_graph_scope" if MEGATRON_CORE_VERSION < (0, 17, 0) else "cuda_graph_modules"
    if getattr(config, field, None) == "full":
        setattr(config, field, [])


def canonical_parameter_name(name: str) -> str:
    """Convert a parameter name of any release to the spelling of 0.16, which is ours.

    The convolution of a Mamba-2 mixer is a submodule in 0.16 (`mixer.conv1d.weight`) and a pair of
    parameters in 0.19 (`mixer.conv1d_weight`); distributed checkpoints use the first in both.
    """
    for kind in ("weight", "bias"):
        if name.endswith(f".conv1d_{kind}"):
            return f"{name.removesuffix(f'_{kind}')}.{kind}"
    return name


def core_model_kind(module: object) -> Literal["gpt", "hybrid"] | None:
    """Return whether a module is a GPTModel of core, or its hybrid model: MambaModel in 0.16,
    HybridModel in 0.19. (By name: the latter's module cannot be imported everywhere.)"""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("megatron.core.models."):
            if kind.__name__ == "GPTModel":
                return "gpt"
            if kind.__name__ in ("MambaModel", "HybridModel"):
                return "hybrid"
    return None


def record_aux_loss(
    name: str,
    value: torch.Tensor,
    layer_number: int,
    num_layers: int,
    group: torch.distributed.ProcessGroup | None,
) -> None:
    """Add a loss of a layer, numbered from 1 in the whole model, to core's tracker, which sums it
    over the ranks of the group when it reports (gloo cannot average)."""
    layer = name, value, layer_number, num_layers
    if MEGATRON_CORE_VERSION < (0, 17, 0):
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        save_to_aux_losses_tracker(*layer, reduce_group=group, reduce_group_has_dp=True)
    else:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().record(*layer, reduce_group=group, needs_dp_avg=False)


def take_aux_losses() -> dict[str, float]:
    """Take the losses that this rank has recorded by `record_aux_loss` since the last call, summed
    over layers and micro-batches."""
    from megatron.core.transformer.moe import moe_utils

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # by releases with a tracker class
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        sums = {name: entry["values"].sum().item() for name, entry in tracker.items()}
        moe_utils.clear_aux_losses_tracker()
    return sums


def forget_aux_losses() -> None:
    """Forget what `record_aux_loss` has recorded, and the number of layers of that model, as core's
    tracker lives as long as the process, for one model."""
    if MEGATRON_CORE_VERSION < (0, 17, 0):
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()
    else:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


@contextmanager
def quiet_core() -> Iterator[None]:
    """Silence core's warnings of older names of torch that it calls itself, of experiments that
    nobody asked for, and of calls that only some releases have. Its errors are still logged."""
    core = logging.getLogger("megatron.core")
    level = core.level
    try:
        core.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        core.setLevel(level)


def start_save(state: dict[str, Any], folder: str) -> Any:
    """Return the asynchronous request of core's distributed checkpoints that writes a sharded
    state; every rank calls it. Newer releases have two ways to write, and the default one needs
    another package."""
    from megatron.core import dist_checkpointing

    parameters = inspect.signature(dist_checkpointing.save).parameters
    options = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}
    return dist_checkpointing.save(state, folder, async_sharded_save=True, **options)


def unused_accelerators() -> dict[str, str | None]:
    """Return why each module of NVIDIA's Transformer Engine and apex is not used, or None if it is.
    (The `apex` on PyPI, another project, has none of them.)"""
    reasons = {name: _UNUSED.get(name) for name in _ACCELERATORS}
    if reasons["transformer_engine.pytorch"] is None and not have_transformer_engine():
        reasons["transformer_engine.pytorch"] = (
            "transformer_engine is installed, but this megatron-core needs another release of it"
        )
    return reasons


def have_transformer_engine() -> bool:
    """Return whether megatron-core found NVIDIA's Transformer Engine when it was imported."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine.HAVE_TE


def transformer_engine_modules() -> ModuleType:
    """Return megatron-core's module of wrappers around Transformer Engine.

    Raises:
        ImportError: Transformer Engine is not installed. (megatron-core itself would go on with a
            mock and fail at the first layer.)
    """
    if not have_transformer_engine():
        reason = unused_accelerators()["transformer_engine.pytorch"]
        raise ImportError(
            f"layer_spec='transformer_engine' needs NVIDIA's Transformer Engine: {reason}. Run "
            "`pip install -e '.[te]'` on a machine with a CUDA toolkit, or use "
            "layer_spec='local' (plain torch, runs anywhere)."
        )
    from megatron.core.extensions import transformer_engine as te

    return te


HAVE_COORDINATOR = MEGATRON_CORE_VERSION >= (0, 19, 0)
"""Whether megatron-core has an inference coordinator whose messages are known here."""


_COORDINATOR_PARTS = {
    "config": "PrefixCachingCoordinatorPolicy",
    "data_parallel_inference_coordinator": "DataParallelInferenceCoordinator",
    "engines.async_zmq_communicator": "AsyncZMQCommunicator",
    "headers": "Headers",
    "inference_client": "InferenceClient",
}


def coordinator_parts() -> SimpleNamespace:
    """Return the classes to speak with megatron-core's inference coordinator, by core's own names,
    with the modules `zmq` and `msgpack`.

    Raises:
        ImportError: this megatron-core has no such coordinator, or a package that it needs is not
            installed.
    """
    if not HAVE_COORDINATOR:
        raise ImportError(
            f"megatron-core {'.'.join(map(str, MEGATRON_CORE_VERSION))} is installed, and this "
            "needs the coordinator of 0.19 or newer: pip install 'megatron-core>=0.19'"
        )
    try:
        import msgpack
        import zmq
    except ImportError as error:
        raise ImportError(
            f"{error}: megatron-core's coordinator needs pip install -e '.[kv-events]', "
            "which has pyzmq and msgpack"
        ) from error
    parts = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPU libraries that these do not need
        for module, name in _COORDINATOR_PARTS.items():
            path = f"megatron.core.inference.{module}"
            parts[name] = getattr(importlib.import_module(path), name)
    return SimpleNamespace(zmq=zmq, msgpack=msgpack, **parts)
