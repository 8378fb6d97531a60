"""Dispatch: the first backend that can serve an op; the reference always can."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_hybrid.ops.contracts import check_of
from megatron_hybrid.ops.gradients import are_wanted, with_gradient
from megatron_hybrid.ops.tape import served

logger = logging.getLogger(__name__)

VARIABLE = "MEGATRON_HYBRID_BACKEND"
REFERENCE = "reference"

forced: str | None = os.environ.get(VARIABLE) or None
"""The one backend to use, read from the environment at import; None means the first that can."""

OPS: dict[str, Op] = {}
"""All ops by name."""


@dataclass
class Planning:
    """What ops would do on another device: in its context they get tensors without values."""

    device_type: str
    served: set[tuple[str, str]] = field(default_factory=set)
    """Ops, and the backends that would serve them."""


planning: ContextVar[Planning | None] = ContextVar("planning", default=None)


def numbers_of(tensor: torch.Tensor, planned: list[int]) -> list[int]:
    """Read the numbers of a vector on the host, which waits for the device; `planned` for one
    without values."""
    return tensor.tolist() if planning.get() is None else planned


@dataclass(frozen=True)
class Backend:
    """An implementation of one op."""

    name: str
    """Name of its library or language: "triton", "fla"."""
    run: Callable[..., Any]
    """Takes all of the op's inputs, by place; returns its outputs."""
    verify: Callable[..., str | None]
    """Takes the op's inputs and returns why it cannot serve them, or None. It runs on every call:
    shapes, dtypes and devices only, no value of a tensor."""
    missing: str | None = None
    """Why it is unusable in this process, such as a library that is not installed."""
    device_type: str | None = None
    """The one kind of device it serves, such as "cuda"; None means any."""
    again: Callable[..., Callable[..., Any] | None] | None = None
    """Takes the op's inputs, and returns what computes the op with a gradient in the backward pass,
    or None for the reference. If None, `run` has a gradient, and takes tensors without values."""
    remarks: Callable[[], Sequence[str]] = tuple
    """What a user should know of it on this device, such as configs that are left out. Called where
    the backend can serve alone."""

    def refusal(self, *inputs: Any) -> str | None:
        """Return why it cannot serve these inputs; None where it can."""
        if self.missing is not None:
            return self.missing
        if self.device_type is not None:
            kind = next(x.device.type for x in inputs if isinstance(x, torch.Tensor))
            if kind != self.device_type:
                return f"it runs on {self.device_type} devices, the inputs are on {kind}"
        return self.verify(*inputs)

    def absence(self) -> str | None:
        """Return why it cannot serve any inputs in this process; None where it may."""
        if self.missing is None and self.device_type == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        return self.missing


class Op:
    """A function of tensors with a reference and any number of faster backends.

    It is called as its reference is, by place or by name.

    Args:
        name: its own.
        reference: serves all inputs; the other backends are tested against it.
        contracts: of each of its tensors, by parameter: see `contracts.py`. T, R and n are those of
            its `layout`.
        conditions: expressions of sizes and parameters that must hold, and the errors.
        reads_host: whether its reference reads tensors, or positions of the layout, on the host.
        helpers: functions that these call.

    Raises:
        TypeError: a tensor has no contract, or a size is tied to nothing.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        contracts: Mapping[str, str],
        conditions: Mapping[str, str] | None = None,
        reads_host: bool = False,
        **helpers: Callable[..., Any],
    ) -> None:
        self.name, self.reads_host = name, reads_host
        self.reference = reference
        self.contracts, self._check = check_of(
            name, reference, contracts, conditions or {}, helpers
        )
        parameters = list(inspect.signature(reference).parameters)
        self.is_ragged = "layout" in parameters
        flat = {name for name, text in contracts.items() if text.startswith("T ")}
        self.flat_inputs = {place for place, name in enumerate(parameters) if name in flat}
        """Places of inputs with a row for each token."""
        self.backends: list[Backend] = []
        """Backends in addition to the reference, in the order that they are asked in."""
        self._told: set[tuple[str, str]] = set()
        functools.update_wrapper(self, reference)
        OPS[name] = self

    def register(self, backend: Backend) -> None:
        """Add a backend, which is asked after those that there are.

        Raises:
            ValueError: the op has one of this name.
        """
        if backend.name in (REFERENCE, *(own.name for own in self.backends)):
            raise ValueError(f"{self.name} has a backend {backend.name!r} already; rename this one")
        self.backends = [*self.backends, backend]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the op; the first input is a tensor.

        Raises:
            TypeError: a tensor has another dtype than its contract says.
            ValueError: it has another shape, or a condition does not hold; or a backend is forced
                that no op has.
            RuntimeError: the forced backend of this op cannot serve the inputs.
        """
        return served(self, self._check(*inputs, **named))

    def serve(self, *inputs: Any) -> Any:
        """Run the op on inputs that fit its contracts, all of them by place."""
        if (plan := planning.get()) is not None:
            return self._plan(plan, inputs)
        if forced is not None:
            backend = self._forced_backend(inputs)
            return self.reference(*inputs) if backend is None else self._run(backend, inputs)
        for backend in self.backends:
            # Asked first, as all else takes longer than a small op on a CPU.
            if (kind := backend.device_type) is not None and kind != inputs[0].device.type:
                continue
            if backend.missing is not None:
                continue
            if (reason := backend.refusal(*inputs)) is None:
                return self._run(backend, inputs)
            self._tell(backend, reason)
        return self.reference(*inputs)

    def _run(self, backend: Backend, inputs: tuple) -> Any:
        if backend.again is None or not are_wanted(inputs):
            return backend.run(*inputs)
        return with_gradient(backend.run, backend.again(*inputs) or self.reference, inputs)

    def _plan(self, plan: Planning, inputs: tuple) -> Any:
        """Run on tensors without values, as what serves such ones on the planned device."""
        for backend in self.backends:
            is_meant = backend.device_type in (None, plan.device_type) and backend.missing is None
            if not is_meant or forced not in (None, backend.name) or backend.verify(*inputs):
                continue
            plan.served.add((self.name, backend.name))
            if backend.again is None:
                return backend.run(*inputs)
            return with_gradient(self.reference, self.reference, inputs)
        plan.served.add((self.name, REFERENCE))
        return self.reference(*inputs)

    def refusals(self, *inputs: Any) -> dict[str, str | None]:
        """Say of each backend in order why it cannot serve these inputs (any inputs, if none are
        given); None where it can."""
        inputs = self._check(*inputs) if inputs else ()
        reasons = {
            backend.name: backend.refusal(*inputs) if inputs else backend.absence()
            for backend in self.backends
        }
        reasons[REFERENCE] = None
        if forced in reasons:
            others = {name: f"{VARIABLE}={forced}" for name in reasons if name != forced}
            return reasons | others
        return reasons

    def _tell(self, backend: Backend, reason: str) -> None:
        """Log a refusal, each once."""
        if (backend.name, reason) not in self._told:
            self._told.add((backend.name, reason))
            logger.info("%s: %s cannot serve: %s", self.name, backend.name, reason)

    def _forced_backend(self, inputs: tuple) -> Backend | None:
        """Return the backend of the forced name; None if the op lacks it: its reference serves."""
        check_forced()
        for backend in self.backends:
            if backend.name == forced:
                if (reason := backend.refusal(*inputs)) is not None:
                    raise RuntimeError(
                        f"{VARIABLE}={forced}, but it cannot serve {self.name}: {reason}. Unset "
                        f"{VARIABLE} to let another backend serve"
                    )
                return backend
        return None


def check_forced() -> None:
    """Raise ValueError where a backend is forced that no op has."""
    known = {REFERENCE} | {backend.name for op in OPS.values() for backend in op.backends}
    if forced is not None and forced not in known:
        raise ValueError(
            f"{VARIABLE} is {forced!r}; the backends are {sorted(known)}. Name one of them, or "
            "unset it"
        )
