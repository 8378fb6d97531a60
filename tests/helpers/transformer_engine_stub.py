"""Stubs of megatron-core's classes around Transformer Engine, in plain torch for one rank.

They have the arguments, the parameter names and the extra state of those, and give the same values.
"""

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import megatron.core.extensions
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid import compat

_NORMS = {"RMSNorm": F.rms_norm, "LayerNorm": F.layer_norm}


@functools.cache
def arguments_in_core(name: str) -> frozenset[str]:
    """Of a class around Transformer Engine, which cannot be imported without that."""
    source = Path(megatron.core.extensions.__path__[0], "transformer_engine.py").read_text()
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    maker = next(f for f in found.body if getattr(f, "name", "") in ("__init__", "__new__"))
    return frozenset(a.arg for a in (*maker.args.args[1:], *maker.args.kwonlyargs))


class _Stub(nn.Module):
    """Keeps a state beside its parameters, as all modules of Transformer Engine do."""

    def get_extra_state(self) -> bytes:
        return b"what Transformer Engine keeps beside its weights"

    def set_extra_state(self, state: bytes) -> None:
        assert state == self.get_extra_state()

    def _add_norm(self, prefix: str, config, size: int) -> None:
        start = 0.0 if config.layernorm_zero_centered_gamma else 1.0
        weight = torch.full((size,), start, dtype=config.params_dtype)
        setattr(self, f"{prefix}weight", nn.Parameter(weight))
        setattr(self, f"{prefix}bias", None)
        if config.normalization == "LayerNorm":
            bias = torch.zeros(size, dtype=config.params_dtype)
            setattr(self, f"{prefix}bias", nn.Parameter(bias))

    def _normed(self, prefix: str, config, eps: float, x: Tensor) -> Tensor:
        weight, bias = getattr(self, f"{prefix}weight").float(), getattr(self, f"{prefix}bias")
        if config.layernorm_zero_centered_gamma:
            weight = 1.0 + weight
        biases = () if bias is None else (bias.float(),)
        norm = _NORMS[config.normalization]
        return norm(x.float(), weight.shape, weight, *biases, eps=eps).to(x.dtype)


class TENorm(_Stub):
    """core makes Transformer Engine's LayerNorm or RMSNorm of it."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.config, self.eps = config, eps
        self._add_norm("", config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self._normed("", self.config, self.eps, x)


class _Linear(_Stub):
    norms_input = False

    def __init__(
        self, input_size: int, output_size: int, config, init_method, bias: bool, skip_bias: bool
    ):
        super().__init__()
        self.config, self.returns_bias = config, skip_bias and bias
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)
        if config.perform_initialization:
            init_method(self.weight.data)
        # Without one, Transformer Engine has an empty tensor that is no parameter.
        self.bias = torch.Tensor()
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
        if self.norms_input:
            self._add_norm("layer_norm_", config, input_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.norms_input:
            x = self._normed("layer_norm_", self.config, self.config.layernorm_epsilon, x)
        if self.returns_bias:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias if self.bias.numel() else None), None


class TEColumnParallelLinear(_Linear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method: Callable,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group=None,
        stride: int = 1,
        **of_this_release,
    ):
        assert of_this_release.keys() <= arguments_in_core(type(self).__name__)
        assert not gather_output and not is_expert and not skip_weight_param_allocation
        assert tp_comm_buffer_name is not None
        super().__init__(input_size, output_size, config, init_method, bias, skip_bias_add)


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """Normalises its input, and holds that norm's parameters."""

    norms_input = True


class TERowParallelLinear(_Linear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config,
        init_method: Callable,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group=None,
        **of_this_release,
    ):
        assert of_this_release.keys() <= arguments_in_core("TERowParallelLinear")
        assert input_is_parallel and not is_expert and tp_comm_buffer_name is not None
        super().__init__(input_size, output_size, config, init_method, bias, skip_bias_add)


STUBS = (TENorm, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear)


def install(patch: pytest.MonkeyPatch) -> None:
    """Let models with the spec `transformer_engine` be built of the stubs."""
    modules = SimpleNamespace(**{stub.__name__: stub for stub in STUBS})
    patch.setattr(compat, "have_transformer_engine", lambda: True)
    patch.setattr(compat, "transformer_engine_modules", lambda: modules)
