"""The training loop, over megatron-core's data parallelism, schedules, optimizers, checkpoints."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import model_folder
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.compat import take_aux_losses
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.flops import training_flops
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.sharding.parallel_setup import initialize_distributed, process_groups
from megatron_hybrid.ranks import fail_together
from megatron_hybrid.text.tokenizer import Tokenizer, find_tokenizer
from megatron_hybrid.training import checkpoints
from megatron_hybrid.training.checkpoints import Checkpoints
from megatron_hybrid.training.cpu_seam import cpu_seam
from megatron_hybrid.training.data.batches import Batch, batches
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.lora import add_adapters, merge_adapters, save_adapters
from megatron_hybrid.training.optimizer import (
    build_optimizer,
    build_schedule,
    fill_step_counts,
    update,
)
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reports import Reports, Stopwatch

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is; a checkpoint holds it."""

    step: int = 0
    """Steps done, skipped ones among them."""
    samples: int = 0
    """Rows read, over all ranks."""
    tokens: int = 0
    """Tokens with a label in them."""
    skipped_steps: int = 0
    """Steps without an update, because a gradient was not finite."""
    skipped_in_row: int = 0
    """The last ones of these."""


class TrainingError(RuntimeError):
    """A run that cannot go on."""


@contextmanager
def training_device() -> Iterator[torch.device]:
    """Choose the device of this rank, where megatron-core trains in here: its GPU, or the CPU."""
    initialize_distributed()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        yield device
    else:
        with cpu_seam():
            yield torch.device("cpu")


class Trainer:
    """A run of a recipe in a folder. Build it on every rank, under `training_device`.

    It takes up the newest whole checkpoint in the folder, if there is one; what it trains then is,
    in the same layout, to the bit what the run would have trained without the stop.

    Args:
        recipe: see there.
        folder: of the run: checkpoints, log.
        device: as `training_device` gave it.

    Raises:
        ValueError: the recipe does not fit the ranks, the data or the tokenizer; on all ranks.
        CheckpointError: a checkpoint cannot be read, or is of another model; on all ranks.
    """

    def __init__(self, recipe: Recipe, folder: str | os.PathLike, device: torch.device):
        self.recipe, self.folder, self.device = recipe, Path(folder), device
        run = recipe.run
        with fail_together(ValueError):
            self.tokenizer = _tokenizer(recipe)
            config = _model_config(recipe, self.tokenizer)
        groups = process_groups(config)
        dp_size = parallel_state.get_data_parallel_world_size()
        rows = run.micro_batch_size * dp_size
        if run.global_batch_size % rows:
            raise ValueError(
                f"run.global_batch_size is {run.global_batch_size}, no multiple of the {rows} rows "
                f"of micro_batch_size={run.micro_batch_size} on {dp_size} data-parallel ranks. "
                "Change one of them."
            )
        self.num_micro_batches = run.global_batch_size // rows
        torch.manual_seed(run.seed)
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(run.seed)
        with device:
            self.model: HybridModel = build_hybrid_model(config, groups)
        if pretrained := recipe.model.get("pretrained"):
            load_checkpoint(self.model, model_folder(pretrained), cast=True)
        if recipe.lora is not None:
            add_adapters(self.model, recipe.lora)
        # Ranks with the same activations drop the same of them, others not.
        dp_rank, pp_rank = parallel_state.get_data_parallel_rank(), groups.pp.rank()
        torch.manual_seed(run.seed + 1 + dp_rank * groups.pp.size() + pp_rank)

        self.train_data, self.eval_data, _ = build_datasets(
            recipe.data,
            self.tokenizer,
            (
                run.steps * run.global_batch_size,
                run.eval_batches * run.global_batch_size if run.eval_every_steps else 0,
                0,
            ),
        )
        config.calculate_per_token_loss = True  # a micro-batch counts by its labels; DDP reads it
        self.chunk = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=recipe.optimizer.distributed,
                overlap_grad_reduce=run.overlap_gradients,
            ),
            self.model,
        )
        config.finalize_model_grads_func = _finalize_gradients
        config.no_sync_func = self.chunk.no_sync
        self.optimizer = build_optimizer([self.chunk], recipe.optimizer)
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = build_schedule(self.optimizer, recipe.optimizer, run.steps)
        self.progress = Progress()
        kept = recipe.checkpoints
        self.checkpoints = Checkpoints(self.folder, kept.keep, kept.asynchronous)
        self._resume()

    def train(self) -> None:
        """Train to the recipe's last step, or until SIGINT or SIGTERM: then the step under way is
        finished, and saved.

        Raises:
            TrainingError: too many steps in a row had no finite gradient.
        """
        run, progress = self.recipe.run, self.progress
        last = min(run.steps, run.stop_at_step or run.steps)
        reports = self._reports()
        watch, losses = Stopwatch(), _Mean()
        data = self._batches(self.train_data, progress.samples)
        saved = progress.step
        try:
            with _stop_signals() as stop:
                while progress.step < last and not stop.is_set():
                    loss, tokens, norm, stops = self._step(data, stop, watch)
                    losses.add(loss, tokens)
                    self.checkpoints.poll()
                    if reports:
                        reports.advance(progress.step, f"loss {loss:.3f}")
                    ends = progress.step == last or stops
                    if progress.step % self.recipe.reports.every_steps == 0 or ends:
                        self._report(reports, watch, losses, norm)
                    if run.eval_every_steps and (progress.step % run.eval_every_steps == 0 or ends):
                        self._report_evaluation(reports, watch)
                    every = self.recipe.checkpoints.every_steps
                    if ends or (every and progress.step % every == 0):
                        self.save()
                        saved = progress.step
                    if stops:
                        break
            if saved != progress.step:
                self.save()
            self.checkpoints.finish()
        finally:
            if reports:
                reports.close()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of a validation token, in nats, the same on all ranks."""
        if self.eval_data is None:
            raise ValueError("the recipe has no validation data: set run.eval_every_steps.")
        run = self.recipe.run
        data = self._batches(self.eval_data, 0)
        self.chunk.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for _ in range(run.eval_batches):
            sums += self._run_batches(data, forward_only=True)
        self.chunk.train()
        total, count = sums.tolist()
        return total / count

    def save(self) -> None:
        """Write a checkpoint; every rank calls it."""
        self.checkpoints.save(self.progress.step, self._state(is_loading=False))

    def export(self, folder: str | os.PathLike) -> None:
        """Write the model and its tokenizer for `load_pretrained`, its adapters merged; every rank
        calls it, at the end."""
        if self.recipe.lora is not None:
            save_adapters(self.model, folder)
            merge_adapters(self.model)
        save_checkpoint(self.model, folder)
        if dist.get_rank() == 0:
            self.tokenizer.save(folder)
        dist.barrier()

    def _step(
        self, data: Iterator[Batch], stop: threading.Event, watch: Stopwatch
    ) -> tuple[float, int, float, bool]:
        """Loss, tokens, norm of the gradient, and whether any rank was asked to stop."""
        progress = self.progress
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self._run_batches(data, forward_only=False, watch=watch)
        flags = torch.tensor([float(stop.is_set())], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        total, count = sums.tolist()
        loss = total / max(1, count)
        self.schedule.step(1)
        if math.isfinite(loss):
            updated, norm = update(self.optimizer)
        else:
            updated, norm = False, math.nan
        progress.step += 1
        progress.samples += self.recipe.run.global_batch_size
        progress.tokens += int(count)
        watch.steps += 1
        progress.skipped_in_row = 0 if updated else progress.skipped_in_row + 1
        progress.skipped_steps += not updated
        if progress.skipped_in_row > self.recipe.run.max_skipped_steps:
            raise TrainingError(
                f"{progress.skipped_in_row} steps in a row, up to step {progress.step}, had a loss "
                f"of {loss} or a gradient of norm {norm}, which is not finite. Lower "
                "optimizer.learning_rate, or look at the data; run.max_skipped_steps is "
                f"{self.recipe.run.max_skipped_steps}."
            )
        return loss, int(count), norm, bool(flags.item())

    def _run_batches(
        self, data: Iterator[Batch], forward_only: bool, watch: Stopwatch | None = None
    ) -> Tensor:
        """[sum of the losses, tokens with a label] of a global batch over all ranks, float64."""
        run, sequence_length = self.recipe.run, self.recipe.data.sequence_length
        outputs = get_forward_backward_func()(
            forward_step_func=partial(self._forward, watch=watch),
            data_iterator=data,
            model=[self.chunk],
            num_microbatches=self.num_micro_batches,
            seq_length=run.micro_batch_size * sequence_length,
            micro_batch_size=1,
            forward_only=forward_only,
            **(
                {"adjust_tensor_shapes_fn": self.model.adjust_tensor_shapes}
                if self.model.boundary_width != self.model.config.hidden_size
                else {}
            ),
        )
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for output in outputs:
            sums += output["sums"]
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(sums, group=_data_parallel_group())
        return sums

    def _forward(
        self, data: Iterator[Batch], chunk: DistributedDataParallel, watch: Stopwatch | None
    ) -> tuple[Tensor, Any]:
        batch = next(data).to(self.device)
        if chunk.training:
            batch = batch.cut(self.recipe.data.longest_sequence(self.progress.step))
        if watch is not None:
            pairs = sum(length * length / 2 for length in batch.lengths)
            watch.tokens += batch.tokens.numel()
            watch.flops += training_flops(self.model, batch.tokens.numel(), pairs)
        with _outside_of_the_seam():
            output = chunk(
                batch.tokens,
                None,
                None,
                labels=batch.labels,
                loss_mask=batch.loss_mask,
                packed_seq_params=batch.packed_seq_params(self.device),
            )
        return output, partial(_loss, batch.loss_mask)

    def _batches(self, dataset: Any, consumed: int) -> Iterator[Batch]:
        run = self.recipe.run
        return batches(
            dataset,
            micro_batch_size=run.micro_batch_size,
            global_batch_size=run.global_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            consumed_samples=consumed,
            workers=self.recipe.data.workers,
        )

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata = checkpoints.OPTIMIZER_FORMAT
        model = self.chunk.module.sharded_state_dict(metadata=metadata)
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata),
            "progress": asdict(self.progress),
            "config": self.model.config.to_dict(),
            "data": self._data_identity(),
            "world_size": dist.get_world_size(),
            "random_state": checkpoints.random_state(),
        }

    def _data_identity(self) -> dict[str, Any]:
        """What the order of the data depends on."""
        data, run = asdict(self.recipe.data), self.recipe.run
        del data["workers"], data["cache_path"]
        return {**data, "rows": run.steps * run.global_batch_size}

    def _resume(self) -> None:
        path = self.checkpoints.newest()
        if path is None:
            return
        with fail_together(CheckpointError):
            common = checkpoints.read_common(path)
            self._check_same_run(path, common)
        if self.recipe.optimizer.distributed:
            # With an Adam of torch, core asserts in `state_dict` that a step has been made.
            for optimizer in self.optimizer.chained_optimizers:
                optimizer._init_optimizer_states_with_dummy_values()
        state = self._state(is_loading=True)
        same_ranks = common["world_size"] == dist.get_world_size()
        if not same_ranks:
            del state["random_state"]
        state = checkpoints.load(path, state)
        self.chunk.module.load_state_dict(state["model"])
        self.progress = Progress(**state["progress"])
        updates = self.progress.step - self.progress.skipped_steps
        fill_step_counts(state["optimizer"], updates)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.num_steps = self.progress.step
        self.schedule.step(0)
        if same_ranks:
            checkpoints.set_random_state(state["random_state"])

    def _check_same_run(self, path: Path, common: dict[str, Any]) -> None:
        saved = HybridConfig.from_dict(common["config"])
        names = saved.differences(self.model.config)
        if names:
            raise CheckpointError(
                f"{path} is of another model, which differs in {', '.join(names)}: "
                f"{names[0]} is {getattr(saved, names[0])!r} there and "
                f"{getattr(self.model.config, names[0])!r} in the recipe. Name another folder, or "
                "correct the recipe."
            )
        if common["data"] != self._data_identity():
            raise CheckpointError(
                f"{path} was trained on {common['data']}, the recipe has "
                f"{self._data_identity()}: the run cannot go on where it stopped. Name "
                "another folder and start it with model.pretrained, or correct the recipe."
            )

    def _reports(self) -> Reports | None:
        if dist.get_rank():
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        fields, steps = self.recipe.reports, self.recipe.run.steps
        return Reports(self.folder, fields, steps, self.progress.step)

    def _report(
        self, reports: Reports | None, watch: Stopwatch, losses: _Mean, norm: float
    ) -> None:
        seconds = watch.seconds
        extra = {**self._balancing_losses(watch), **self._losses_ahead()}
        work = torch.tensor([watch.flops], dtype=torch.float64, device=self.device)
        dist.all_reduce(work)
        if reports:
            ranks = dist.get_world_size()
            flops = work.item() / seconds / ranks
            copies = parallel_state.get_data_parallel_world_size()
            values = {
                "loss": losses.value,
                "gradient_norm": norm,
                "learning_rate": self.schedule.optimizer.param_groups[0]["lr"],
                "tokens": self.progress.tokens,
                "samples": self.progress.samples,
                "tokens_per_second": watch.tokens * copies / seconds,
                "tflops_per_rank": flops / 1e12,
                "skipped_steps": self.progress.skipped_steps,
                **extra,
            }
            speed = f"{flops / 1e12:.3g} TFLOP/s"
            if (peak := self.recipe.reports.peak_flops) is not None:
                values["flops_utilisation"] = flops / peak
                speed = f"{flops / peak:.1%} of peak"
            line = (
                f"step {self.progress.step}  loss {values['loss']:.4f}  grad {norm:.2f}  "
                f"lr {values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tokens/s  "
                f"{speed}"
            )
            if self.progress.skipped_steps:
                line += f"  {self.progress.skipped_steps} skipped"
            reports.write(self.progress.step, line, **values)
        losses.clear()
        watch.restart()

    def _balancing_losses(self, watch: Stopwatch) -> dict[str, float]:
        """Auxiliary losses of the routers, mean of a layer and a micro-batch since the last report;
        every rank calls it."""
        groups = parallel_state.get_pipeline_model_parallel_group(), _data_parallel_group()
        sums = take_aux_losses()
        for group in groups:  # core's own reduction has pipeline stages without experts hang
            parts: list[dict[str, float]] = [{}] * group.size()
            dist.all_gather_object(parts, sums, group=group)
            sums = {
                name: math.fsum(part.get(name, 0.0) for part in parts)
                for name in sorted(set().union(*parts))
            }
        layers = sum(self.model.config.layer_pattern.count(symbol) for symbol in "EBD")
        count = max(1, watch.steps * self.num_micro_batches * layers)
        return {name: value / count for name, value in sums.items()}

    def _losses_ahead(self) -> dict[str, float]:
        """Losses of multi-token prediction in the last micro-batch."""
        ahead = getattr(self.model, "mtp", None)
        if ahead is None or ahead.losses is None:
            return {}
        return {f"mtp_loss_{i}": loss for i, loss in enumerate(ahead.losses.tolist(), start=1)}

    def _report_evaluation(self, reports: Reports | None, watch: Stopwatch) -> None:
        loss = self.evaluate()
        if reports:
            step, tokens = self.progress.step, self.progress.tokens
            reports.write(step, f"step {step}  eval {loss:.4f}", eval_loss=loss, tokens=tokens)
        watch.restart()


class _Mean:
    """Mean loss of a token over several steps; of those that have one."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._total, self._tokens = 0.0, 0

    def add(self, loss: float, tokens: int) -> None:
        if math.isfinite(loss):
            self._total += loss * tokens
            self._tokens += tokens

    @property
    def value(self) -> float:
        return self._total / self._tokens if self._tokens else math.nan


def _data_parallel_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group()


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses and number of the tokens with a label, as core's schedules take them."""
    total, count = (losses * mask).sum(), mask.sum()
    sums = torch.stack((total.detach(), count)).double()
    return total, count.int(), {"sums": sums}


def _finalize_gradients(
    chunks: Sequence[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any
) -> None:
    """After the backward passes of a step: sum gradients over ranks and divide by the tokens."""
    for chunk in chunks:
        chunk.module.sum_shared_gradients()
    finalize_model_grads(list(chunks), num_tokens, **options)


def _outside_of_the_seam() -> AbstractContextManager:
    """The model needs no answers in core's place, and its many calls would be slower with them."""
    return nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that is set when the process is asked to end, so that it can end after its step. A
    second SIGINT ends it at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, _: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tokenizer(recipe: Recipe) -> Tokenizer:
    folder = model_folder(recipe.tokenizer)
    if find_tokenizer(folder) is None:
        raise ValueError(
            f"tokenizer is {recipe.tokenizer!r}, but there is no tokenizer.json in {folder}. Name "
            "the folder of a tokenizer, or 'demo'."
        )
    return Tokenizer.from_folder(folder)


def _model_config(recipe: Recipe, tokenizer: Tokenizer) -> HybridConfig:
    fields = dict(recipe.model)
    pretrained = fields.pop("pretrained", None)
    if pretrained is None:
        return recipe.model_config(tokenizer.vocab_size)
    return read_config(model_folder(pretrained), perform_initialization=False, **fields)
