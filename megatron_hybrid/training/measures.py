"""Measures: losses, speed and work of a run between two reports."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hybrid.compat import forget_aux_losses, take_aux_losses
from megatron_hybrid.models.flops import training_flops
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.router import Router
from megatron_hybrid.training.data.batches import Batch

_PEAK_TFLOPS = {"GH200": 989.0, "H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense bf16 TFLOP/s by a part of the device's name, from NVIDIA's data sheets."""


class Measures:
    """Counts of this rank's work, and means over all ranks.

    Args:
        model: this rank's part.
        peak_tflops: peak of one device; None takes that of the device's name, if it is known.
    """

    def __init__(self, model: HybridModel, peak_tflops: float | None = None):
        self._model = model
        self._device = next(model.parameters()).device
        if peak_tflops is None and self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
            peak_tflops = next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)
        self._peak_tflops = peak_tflops
        self._per_token, self._per_pair = training_flops(model)
        self._num_routers = sum(isinstance(module, Router) for module in model.modules())
        forget_aux_losses()  # of another model in this process
        self.restart()

    def restart(self) -> None:
        """Start all measures anew."""
        self._sums = {"steps": 0, "collected": 0}
        self._metrics: dict[str, tuple[float, float]] = {"loss": (0.0, 0.0)}
        self._balancing: dict[str, float] = {}
        self._micro_batches = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Measure speed and work from here on, such as after work that does not train."""
        self._tokens, self._flops = 0, 0.0
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return the measures since the last report, except speed; every rank calls it. A run that
        goes on from here reports the same after `load_state`."""
        self._collect_balancing()
        found = {"sums": self._sums, "balancing": self._balancing, "metrics": self._metrics}
        return {name: dict(values) for name, values in found.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums, self._balancing = dict(state["sums"]), dict(state["balancing"])
        self._metrics = dict(state["metrics"])

    def count_batch(self, batch: Batch) -> None:
        """Count the forward and backward pass of a micro-batch, without recomputation."""
        tokens = batch.tokens.numel()
        pairs = sum(length * length / 2 for length in batch.lengths)
        self._tokens += tokens
        self._micro_batches += 1
        self._flops += self._per_token * tokens + self._per_pair * pairs

    def add_step(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Add the sums and counts of a step by name, if that of "loss" is finite."""
        self._sums["steps"] += 1
        for name, (value, count) in metrics.items() if math.isfinite(metrics["loss"][0]) else ():
            total, counts = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = total + value, counts + count

    def take(self) -> dict[str, float]:
        """Return the measures since the last call, by name; every rank calls it."""
        seconds = time.perf_counter() - self._start
        flops = torch.tensor([self._flops], dtype=torch.float64, device=self._device)
        dist.all_reduce(flops)
        tflops = flops.item() / seconds / dist.get_world_size() / 1e12
        replicas = parallel_state.get_data_parallel_world_size()
        self._collect_balancing()
        steps = max(1, self._sums["steps"])
        values = {
            **{name: mean_of(sums) for name, sums in self._metrics.items()},
            "tokens_per_second": self._tokens * replicas / seconds,
            "tflops_per_rank": tflops,
            **{name: value / steps for name, value in self._balancing.items()},
            **self._losses_ahead(),
        }
        if self._peak_tflops is not None:
            values["flops_utilisation"] = tflops / self._peak_tflops
        self.restart()
        return values

    def _collect_balancing(self) -> None:
        """Add the auxiliary losses of the routers since the last call: for each step the mean over
        routers and micro-batches."""
        steps = self._sums["steps"] - self._sums["collected"]
        self._sums["collected"] += steps
        sums: dict[str, float] = take_aux_losses()
        # Core's own reduction waits for stages without experts.
        own = {**sums, "routers": float(self._num_routers)}
        total = _sum_over(parallel_state.get_pipeline_model_parallel_group(), own)
        routers_of_model = total.pop("routers")
        total = _sum_over(parallel_state.get_data_parallel_group(), total)
        count = max(1.0, self._micro_batches * routers_of_model)
        self._micro_batches = 0
        for name, value in total.items():
            self._balancing[name] = self._balancing.get(name, 0.0) + value / count * steps

    def _losses_ahead(self) -> dict[str, float]:
        """Return the losses of multi-token prediction in the last micro-batch."""
        ahead = getattr(self._model, "mtp", None)
        if ahead is None or ahead.losses is None:
            return {}
        return {f"mtp_loss_{i}": loss for i, loss in enumerate(ahead.losses.tolist(), start=1)}


def mean_of(sums: tuple[float, float]) -> float:
    """Return the mean of a sum and a count, NaN if the count is 0."""
    return sums[0] / sums[1] if sums[1] else math.nan


def _sum_over(group: dist.ProcessGroup, values: dict[str, float]) -> dict[str, float]:
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, values, group=group)
    names = sorted(set().union(*parts))
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}
