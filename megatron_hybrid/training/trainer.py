"""The training loop, over megatron-core's data parallelism, schedules, optimizers, checkpoints."""

import math
import os
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property, partial
from itertools import filterfalse, islice
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
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import model_folder
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.compat import quiet_core
from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.models.config.hybrid_config import SAVED_FIELDS, HybridConfig, decode_fields
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.one_rank_draw import draw_as_one_rank
from megatron_hybrid.models.packed_weight import require_unpacked
from megatron_hybrid.models.sharding.parallel_setup import core_process_groups, torch_distributed
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import find_tokenizer
from megatron_hybrid.training import checkpoints
from megatron_hybrid.training.checkpoints import Checkpoints
from megatron_hybrid.training.core_cpu_patch import core_cpu_patch
from megatron_hybrid.training.data.batches import Batch, batches, count_micro_batches
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.data.rows import contents_of
from megatron_hybrid.training.dpo import DpoLoss
from megatron_hybrid.training.footprint import check_fits
from megatron_hybrid.training.grpo import GrpoLoss
from megatron_hybrid.training.lora import add_adapters, save_adapters
from megatron_hybrid.training.losses import CrossEntropy, Loss, check_loss, check_sums
from megatron_hybrid.training.measures import Measures, mean_of
from megatron_hybrid.training.optimizer import (
    build_optimizer,
    build_schedule,
    correct_loaded,
    describe_optimizers,
    update,
)
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reference_policy import ReferencePolicy
from megatron_hybrid.training.reports import Reports
from megatron_hybrid.training.rollouts import Prompts, Rollouts
from megatron_hybrid.training.run_lock import RunLock, check_shared
from megatron_hybrid.utils.child_lifetime import ends_with_launcher
from megatron_hybrid.utils.files import digest_of_files, no_new_folders
from megatron_hybrid.utils.stop_signals import stop_signals

ADAPTERS = "adapters"
"""Folder of the adapters alone, in that of an exported model."""
_LOSS_FIELDS = (
    "params_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "mtp_loss_scaling_factor",
)
"""Fields of the model that change the training, but no forward pass."""
_SECTIONS_OF_RESULTS = ("data", "run", "optimizer", "lora", "dpo", "grpo")
_FREE_FIELDS = {
    *("data.workers", "data.cache_path", "grpo.cache_bytes"),
    *("run.stop_at_step", "run.micro_batch_size", "run.eval_every_steps"),
    *("run.max_skipped_steps", "run.overlap_gradients"),
    *("optimizer.learning_rate", "optimizer.min_learning_rate", "optimizer.warmup_steps"),
    *("optimizer.decay", "optimizer.decay_steps"),
    *("optimizer.weight_decay", "optimizer.end_weight_decay"),
}
"""Fields that may differ when a run goes on: those that change results only by rounding, and the
rates from there on."""
_FREE_OF_MODEL = re.compile(
    "parallel|pipeline|recompute|overlap|offload|fus(ed|ion)|cuda_graph|comm|dispatcher|gemm"
    "|backend|init|layer_spec"
)
"""Fields of the model that may differ: how it is laid out and computed."""
_SHIPPED = (CrossEntropy, DpoLoss, GrpoLoss)


@dataclass
class Progress:
    """Progress of a run; a checkpoint holds it."""

    step: int = 0
    """Steps done, including skipped ones."""
    samples: int = 0
    """Rows read, over all ranks."""
    tokens: int = 0
    """Tokens with a label in these rows."""
    skipped_steps: int = 0
    """Steps without an update, because a loss or gradient was not finite."""
    skipped_in_row: int = 0
    """Number of the latest steps in a row that were skipped."""


@dataclass(frozen=True)
class Step:
    """An optimizer step."""

    loss: float
    """Mean loss of a token with a label, in nats, over all ranks; for another loss, the mean of the
    items that it counts."""
    gradient_norm: float
    """Norm of the gradient over all parameters and ranks, before it was clipped."""
    updated: bool
    """Whether the model was updated: loss and norm must be finite, which takes a label."""


class TrainingError(RuntimeError):
    """A run that cannot go on."""


@contextmanager
def training_device() -> Iterator[torch.device]:
    """Yield the device of this rank, its GPU or the CPU, in a context in which megatron-core trains
    there."""
    with torch_distributed(), ends_with_launcher():
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            with torch.cuda.device(device):
                yield device
        else:
            with core_cpu_patch():
                yield torch.device("cpu")


class Trainer:
    """A run of a recipe in a folder. Build it on every rank, under `training_device`.

    The run continues from the newest whole checkpoint in the folder, if there is one. In the same
    layout it then trains the same weights, to the bit, as a run that was never stopped.

    Args:
        recipe: sizes, data and settings of the run.
        folder: that of the run, with checkpoints and log.
        device: the one that `training_device` gave.
        loss: the loss to minimise; None takes the recipe's.

    Raises:
        ValueError: the recipe or the loss does not fit the ranks, the data, the model or the
            tokenizer; on all ranks.
        CheckpointError: a checkpoint cannot be read, or is of another model; on all ranks.
        OSError: the folder cannot be written, or belongs to a run that is under way; on all ranks.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: str | os.PathLike,
        device: torch.device,
        loss: Loss | None = None,
    ):
        self.recipe, self.folder, self.device = recipe, Path(folder), device
        self.loss = _loss_of(recipe) if loss is None else loss
        with fail_together(ValueError, whole_job=True):
            self.tokenizer = tokenizer_of(recipe)
            config = model_config_of(recipe, self.tokenizer)
            _check_loss(self.loss, recipe, config)
        with no_new_folders(self.folder):
            with fail_together(OSError, whole_job=True):
                lock = RunLock(self.folder) if dist.get_rank() == 0 else None
                for left in self.folder.rglob(".*.tmp") if lock else ():
                    left.unlink(missing_ok=True)  # a killed run has left it
            self._release = weakref.finalize(self, lock.release if lock else lambda: None)
            try:
                text = [lock and lock.text]
                dist.broadcast_object_list(text, src=0)
                with fail_together(OSError, whole_job=True):
                    check_shared(self.folder, text[0])
                self._set_up(config)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the engine of rollouts, and unlock the folder for another run. Call it after all
        checkpoints are saved. The end of the object unlocks the folder, too."""
        if getattr(self, "rollouts", None) is not None:
            self.rollouts.engine.close()
        self._release()

    @torch.inference_mode(False)  # with gradients, whatever the caller's mode
    def _set_up(self, config: HybridConfig) -> None:
        recipe, run, device = self.recipe, self.recipe.run, self.device
        if (memory := device_memory(device)) is not None:
            with fail_together(ValueError, whole_job=True):
                check_fits(recipe, config, dist.get_world_size(), device.type, memory)
        groups = core_process_groups(config)
        dp_size = parallel_state.get_data_parallel_world_size()
        sizes = run.global_batch_size, run.micro_batch_size
        self.num_micro_batches = count_micro_batches(*sizes, dp_size)
        if recipe.grpo is not None and run.global_batch_size % (recipe.grpo.group_size * dp_size):
            raise ValueError(
                f"run.global_batch_size is {run.global_batch_size}, no multiple of grpo.group_size="
                f"{recipe.grpo.group_size} times the {dp_size} data-parallel ranks."
            )
        kept = recipe.checkpoints
        self.checkpoints = Checkpoints(self.folder, kept.keep, kept.asynchronous)
        saved = self.checkpoints.newest()
        is_drawn_whole = "pretrained" not in recipe.model and not config.perform_initialization
        with device:
            torch.manual_seed(run.seed)
            if torch.cuda.is_available():
                model_parallel_cuda_manual_seed(run.seed)
            self.model: HybridModel = build_hybrid_model(config, groups)
            if is_drawn_whole and saved is None:
                alone = recipe.model_config(self.tokenizer.vocab_size, is_on_one_rank=True)
                draw_as_one_rank(self.model, alone)
        if pretrained := recipe.model.get("pretrained"):
            # This fails on all ranks of one model; here it must fail on all ranks of the job.
            with fail_together(CheckpointError, whole_job=True):
                load_checkpoint(self.model, model_folder(pretrained), cast=True)
            require_unpacked(self.model, "the model cannot be trained")
        if recipe.lora is not None:
            add_adapters(self.model, recipe.lora)
        self.reference: ReferencePolicy | None = None
        """The policy that the run began with; None if the loss does not need it."""
        if self.loss.needs_reference:
            with device:
                self.reference = ReferencePolicy(self.model, recipe.lora is not None)
        # Ranks with the same activations drop the same ones, other ranks do not.
        dp_rank, pp_rank = parallel_state.get_data_parallel_rank(), groups.pp.rank()
        torch.manual_seed(run.seed + 1 + dp_rank * groups.pp.size() + pp_rank)

        if recipe.grpo is None:
            sizes = run.steps, run.eval_batches if run.eval_every_steps else 0, 0
            self.train_data, self.eval_data, _ = build_datasets(
                recipe.data, self.tokenizer, tuple(size * run.global_batch_size for size in sizes)
            )
        else:
            with fail_together(ValueError, whole_job=True):
                self.train_data, self.eval_data = Prompts(recipe, self.tokenizer), None
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=recipe.optimizer.distributed,
            overlap_grad_reduce=run.overlap_gradients,
        )
        with quiet_core():
            self.chunk = DistributedDataParallel(config, ddp_config, self.model)
        self._count = torch.zeros((), dtype=torch.float64, device=device)
        is_whole = recipe.data.kind != "sft" and type(self.loss) in _SHIPPED
        unit = 1 if is_whole else 1024
        config.finalize_model_grads_func = partial(_finalize_gradients, self._count, unit)
        config.no_sync_func = self.chunk.no_sync
        self.optimizer = build_optimizer([self.chunk], recipe.optimizer)
        if recipe.optimizer.name == "muon" and dist.get_rank() == 0:
            print(describe_optimizers(self.model, recipe.optimizer), file=sys.stderr)
        self.schedule = build_schedule(self.optimizer, recipe.optimizer, run.steps)
        self.measures = Measures(self.model, recipe.reports.peak_tflops)
        self.progress = Progress()
        if saved is not None:
            self._resume(saved)
        self.rollouts: Rollouts | None = None
        if recipe.grpo is not None:
            self.rollouts = Rollouts(self.chunk, self.tokenizer, recipe, self.train_data)

    def train(self) -> None:
        """Train to the recipe's last step, or until SIGINT or SIGTERM. After a signal the running
        step is finished and saved.

        Raises:
            TrainingError: too many steps in a row, or all steps, had no finite gradient; or an
                evaluation would have no label.
            ValueError: a line of the log is no report, or the loss returned unusable sums.
            ImportError, OSError: a writer of the reports lacks its package, or does not start; on
                all ranks.
        """
        run, progress = self.recipe.run, self.progress
        last = min(run.steps, run.stop_at_step or run.steps)
        reports, recipe = None, self.recipe
        self._require_validation_labels()
        with fail_together(OSError, whole_job=True):
            if dist.get_rank() == 0:
                fields = recipe.to_dict()
                reports = Reports(self.folder, recipe.reports, run.steps, progress.step, fields)
        data = self.batches() if progress.step < last else iter(())
        self.measures.restart_clock()
        try:
            if self._lacks_evaluation(reports):  # a kill has interrupted it
                self._report_evaluation(reports)
            with stop_signals() as stop:
                ends = progress.step >= last
                while not ends:
                    step = self.step(data)
                    self.checkpoints.finish(wait=False)
                    ends = progress.step == last or self._any_rank(stop.is_set())
                    if reports:
                        reports.advance(progress.step, step.loss)
                    is_last = progress.step == run.steps  # a stopped run reports when it goes on
                    if is_last or _is_due(recipe.reports.every_steps, progress.step):
                        self._report(reports, step)
                    if ends or _is_due(self.recipe.checkpoints.every_steps, progress.step):
                        self.save()
                    if ends:  # save before the evaluation, in which a job may be killed
                        self.checkpoints.finish()
                    if self._lacks_evaluation(reports):
                        self._report_evaluation(reports)
        finally:
            if reports:
                reports.close()
        if progress.step == progress.skipped_steps == run.steps:
            raise TrainingError(
                f"none of the {run.steps} steps has changed the model: no loss or gradient was "
                "finite, or there was no label. Look at the log and at the data."
            )

    def _require_validation_labels(self) -> None:
        """Raise TrainingError if evaluations would have no label."""
        if self.eval_data is None:
            return
        number, data = self.recipe.run.eval_batches, self._batches(self.eval_data, 0)
        own = islice(data, number * self.num_micro_batches)
        if not self._any_rank(any(bool(batch.loss_mask.any()) for batch in own)):
            raise TrainingError(
                f"the validation data has no label in the {number} batches of an evaluation: "
                "correct data.valid, or set run.eval_every_steps=0."
            )

    def _lacks_evaluation(self, reports: Reports | None) -> bool:
        """Return whether an evaluation of this step is due, and missing in the log."""
        step, run = self.progress.step, self.recipe.run
        is_due = step and (step == run.steps or _is_due(run.eval_every_steps, step))
        lacks = self.eval_data and is_due and reports and step not in reports.evaluated
        return self._any_rank(bool(lacks))

    def batches(self) -> Iterator[Batch]:
        """Return this rank's micro-batches of training data, from the present step on."""
        if self.rollouts is not None:
            return self.rollouts.batches(self.progress.step)
        data, fields = self._batches(self.train_data, self.progress.samples), self.recipe.data
        return (batch.cut(fields.longest_sequence(self.progress.step)) for batch in data)

    @torch.inference_mode(False)
    def step(self, data: Iterator[Batch]) -> Step:
        """Train on the next global batch; every rank calls it.

        Args:
            data: the iterator of `batches`, from which this step takes `num_micro_batches`.

        Raises:
            TrainingError: too many steps in a row had no finite gradient; or the data has ended.
        """
        progress = self.progress
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        try:
            metrics, num_labels = self._run_batches(data, forward_only=False)
        except StopIteration as end:
            raise TrainingError(f"the data ends at run.steps={progress.step}: raise it.") from end
        loss = mean_of(metrics["loss"])
        self.schedule.step(1)
        if math.isfinite(loss):  # weights must not decay without a label
            updated, norm = update(self.optimizer)
        else:
            updated, norm = False, math.nan
        progress.step += 1
        progress.samples += self.recipe.run.global_batch_size
        progress.tokens += num_labels
        progress.skipped_in_row = 0 if updated else progress.skipped_in_row + 1
        progress.skipped_steps += not updated
        self.measures.add_step(metrics)
        if progress.skipped_in_row > self.recipe.run.max_skipped_steps:
            self.checkpoints.finish()
            raise TrainingError(
                f"{progress.skipped_in_row} steps in a row, up to step {progress.step}, had a loss "
                f"of {loss} or a gradient of norm {norm}, which is not finite, or no label. Lower "
                "optimizer.learning_rate, or look at the data; run.max_skipped_steps is "
                f"{self.recipe.run.max_skipped_steps}."
            )
        return Step(loss, norm, updated)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Compute the mean loss of a validation token, in nats, or of the items that the loss
        counts; the same on all ranks."""
        if self.eval_data is None:
            raise ValueError("the recipe has no validation data: set run.eval_every_steps.")
        data = self._batches(self.eval_data, 0)
        self.chunk.eval()
        losses = [
            self._run_batches(data, forward_only=True)[0]["loss"]
            for _ in range(self.recipe.run.eval_batches)
        ]
        self.chunk.train()
        total, count = (math.fsum(each) for each in zip(*losses))
        return mean_of((total, count))

    def save(self) -> None:
        """Write a checkpoint; every rank calls it."""
        self.checkpoints.save(self.progress.step, self._state(is_loading=False))

    def export(self, folder: str | os.PathLike) -> None:
        """Write the model and its tokenizer for `load_pretrained`, with its adapters merged, and
        the adapters alone in the folder "adapters" there. Every rank calls it; the run may go on.

        Raises:
            OSError, CheckpointError: the folder cannot be written; on all ranks.
        """
        folder = Path(folder)
        with fail_together(OSError, whole_job=True):  # files are written after all gathers
            if self.recipe.lora is not None:
                save_adapters(self.model, folder / ADAPTERS, self.recipe.model["pretrained"])
        with fail_together(OSError, whole_job=True):
            save_checkpoint(self.model, folder)
            if dist.get_rank() == 0:
                self.tokenizer.save(folder)

    def _run_batches(
        self, data: Iterator[Batch], forward_only: bool
    ) -> tuple[dict[str, tuple[float, float]], int]:
        """Run a global batch forward, and backward if not forward_only.

        Returns:
            Sums and counts of the loss and its metrics, by name, and the number of tokens with a
            label; all over all ranks.
        """
        if self.reference is not None:
            data = self._with_reference([next(data) for _ in range(self.num_micro_batches)])
        self._count.zero_()
        outputs = self._schedule(data, self.chunk, forward_only=forward_only)
        names = ("loss", *self.loss.metrics)
        sums = torch.zeros(2 * len(names) + 1, dtype=torch.float64, device=self.device)
        for output in outputs:  # on the last pipeline stage
            sums += output["sums"]
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        *values, num_labels = sums.tolist()
        return dict(zip(names, zip(values[::2], values[1::2]))), int(num_labels)

    @torch.no_grad()
    def _with_reference(self, given: list[Batch]) -> Iterator[Batch]:
        """Add the log-probabilities of the reference policy, on the last pipeline stage."""
        with self.reference.policy() as policy:
            outputs = self._schedule(
                iter(given), policy, forward_only=True, collect_non_loss_data=True
            )
        if outputs:
            columns = [{**one.columns, "reference": found} for one, found in zip(given, outputs)]
            given = [replace(one, columns=each) for one, each in zip(given, columns)]
        return iter(given)

    def _schedule(self, data: Iterator[Batch], model: nn.Module, **options: Any) -> list[Any]:
        """Run core's schedule over the micro-batches of a step."""
        if self.model.boundary_width != self.model.config.hidden_size:
            options["adjust_tensor_shapes_fn"] = self.model.adjust_tensor_shapes
        return get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=data,
            model=[model],
            num_microbatches=self.num_micro_batches,
            seq_length=self.recipe.run.micro_batch_size * self.recipe.data.sequence_length,
            micro_batch_size=1,
            **options,
        )

    def _forward(self, data: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Any]:
        batch = next(data).to(self.device)
        if chunk.training:
            self.measures.count_batch(batch)
        # The model does not need the patch of core, and its many calls would be slower.
        with nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction():
            output = chunk(
                batch.tokens,
                None,
                None,
                labels=batch.labels,
                loss_mask=batch.loss_mask,
                padding_mask=batch.padding_mask,
                packed_seq_params=batch.packed_seq_params(),
            )
        return output, partial(self._loss, batch)

    def _loss(self, batch: Batch, losses: Tensor, non_loss_data: bool = False) -> Any:
        """Return the values for core's schedules: the loss's total, a count, and all sums."""
        if non_loss_data:
            return -losses
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # whatever the loss sets
            log_probs = -losses
            found = self.loss(log_probs, batch)
        if type(self.loss) not in _SHIPPED:  # the check waits for the GPU
            check_sums(self.loss, found, log_probs)
        metrics = [value for name in self.loss.metrics for value in found.metrics[name]]
        num_labels = batch.loss_mask.count_nonzero()
        sums = [found.total.detach(), found.count, *metrics, num_labels]
        self._count += found.count
        return found.total, num_labels.int(), {"sums": torch.stack(sums).double()}

    def _any_rank(self, flag: bool) -> bool:
        flags = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

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
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
        if self.recipe.lora is not None:  # the others are those of `model.pretrained`
            model = {name: each for name, each in model.items() if ".lora." in name}
        return {
            "model": model,
            "optimizer": optimizer,
            "progress": asdict(self.progress),
            "measures": self.measures.state(),
            "config": self.model.config.to_dict(),
            "kept": self._kept_fields(),
            "world_size": dist.get_world_size(),
            "random_state": checkpoints.random_state(),
        }

    def _kept_fields(self) -> dict[str, Any]:
        """Return what, in addition to `HybridConfig.differences`, a resumed run must share: all
        fields that results depend on, the contents of the data, and the loss."""
        fields, config = self.recipe.to_dict(), self.model.config
        kept = {
            f"{section}.{name}": value
            for section in _SECTIONS_OF_RESULTS
            for name, value in (fields[section] or {}).items()
        }
        own = {*_LOSS_FIELDS, *fields["model"]} - {"pretrained", *SAVED_FIELDS} | {"params_dtype"}
        own = filterfalse(_FREE_OF_MODEL.search, own)
        kept |= {f"model.{name}": str(getattr(config, name)) for name in own}
        is_own = type(self.loss) not in _SHIPPED and is_dataclass(self.loss)
        return {name: value for name, value in kept.items() if name not in _FREE_FIELDS} | {
            "the contents of the data": contents_of(self.train_data),
            "the contents of data.valid": contents_of(self.eval_data) if self.eval_data else None,
            "the loss": repr(self.loss) if is_own else type(self.loss).__qualname__,
            "the weights of model.pretrained": self._base_weights,
        }

    @cached_property
    def _base_weights(self) -> str | None:
        """Digest of the pretrained weights that a resumed run needs again; None if none."""
        if self.recipe.lora is None and not self.loss.needs_reference:
            return None
        folder = model_folder(self.recipe.model["pretrained"])
        return digest_of_files(sorted(folder.glob("*.safetensors")))

    def _resume(self, path: Path) -> None:
        with fail_together(CheckpointError, whole_job=True):
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
        self.chunk.module.load_state_dict(state["model"], strict=self.recipe.lora is None)
        self.progress = Progress(**state["progress"])
        self.measures.load_state(state["measures"])
        updates = self.progress.step - self.progress.skipped_steps
        correct_loaded(state["optimizer"], updates, self.optimizer.param_groups)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.num_steps = self.progress.step
        self.schedule.step(0)
        if same_ranks:
            checkpoints.set_random_state(state["random_state"])

    def _check_same_run(self, path: Path, common: dict[str, Any]) -> None:
        saved, config = HybridConfig.from_dict(common["config"]), self.model.config
        names = saved.differences(config)
        found = [(f"model.{name}", getattr(saved, name), getattr(config, name)) for name in names]
        before, now = common["kept"], self._kept_fields()
        both = [(name, before.get(name), now.get(name)) for name in {**now, **before}]
        found += [each for each in both if each[1] != each[2]]
        if found:
            # An equal field, such as layer_overrides, follows one that differs.
            found = [each for each in found if each[1] != each[2]] or found
            name, there, here = found[0]
            differing = ", ".join(each[0] for each in found)
            raise CheckpointError(
                f"{path} was saved with {name}={there!r}, the recipe has {here!r}: another run, "
                f"which differs in {differing}. Name another folder, or correct the recipe."
            )

    def _report(self, reports: Reports | None, step: Step) -> None:
        measured, progress = self.measures.take(), self.progress
        with fail_together(OSError, whole_job=True):
            if reports is not None:
                reports.write(
                    progress.step,
                    **measured,
                    gradient_norm=step.gradient_norm,
                    learning_rate=get_canonical_lr_for_logging(self.optimizer.param_groups),
                    tokens=progress.tokens,
                    samples=progress.samples,
                    skipped_steps=progress.skipped_steps,
                )

    def _report_evaluation(self, reports: Reports | None) -> None:
        loss = self.evaluate()
        with fail_together(OSError, whole_job=True):
            if reports:
                reports.write(self.progress.step, eval_loss=loss, tokens=self.progress.tokens)
        self.measures.restart_clock()


def device_memory(device: torch.device) -> int | None:
    """Return a GPU's bytes, or None for a CPU, whose memory is shared and may be swapped."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _finalize_gradients(
    count: Tensor,
    unit: int,
    chunks: Sequence[DistributedDataParallel],
    _: Tensor,
    **options: Any,
) -> None:
    """Sum gradients over ranks and divide them by the loss's count on all ranks, after the backward
    passes of a step. `count` is that of this rank, in place of core's integer; core raises a count
    below 1 to 1. `unit` is 1, or a power of two if weights are summed, which are at least 0.001."""
    finalize_model_grads(list(chunks), count * unit, **options)
    for chunk in chunks:  # core's reductions have ended by now
        if unit > 1:
            chunk.scale_gradients(unit)
        chunk.module.sum_shared_gradients()


def _loss_of(recipe: Recipe) -> Loss:
    if recipe.grpo is not None:
        return GrpoLoss(recipe.grpo)
    return CrossEntropy() if recipe.dpo is None else DpoLoss(recipe.dpo)


def _check_loss(loss: Loss, recipe: Recipe, config: HybridConfig) -> None:
    """Raise ValueError if the loss cannot be trained with this recipe."""
    check_loss(loss)
    name, kind = type(loss).__name__, recipe.data.kind
    section = {"preferences": "dpo", "prompts": "grpo"}.get(kind)
    if section is not None and isinstance(loss, CrossEntropy):
        raise ValueError(
            f"data.kind is {kind!r}, of which cross entropy learns nothing: set {section}."
        )
    for field in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if recipe.grpo is not None and (size := getattr(config, field)) > 1:
            raise ValueError(
                f"grpo with {field}={size}: each replica draws its completions alone, and its "
                "batches have lengths of their own. Use data or tensor parallelism."
            )
    if loss.needs_reference and "pretrained" not in recipe.model:
        raise ValueError(
            f"the loss {name} compares with the model that the run begins with: set "
            "model.pretrained, which it finds again when it goes on."
        )
    by_label = ("moe_aux_loss_coeff", "moe_z_loss_coeff")  # core adds these to each label's loss
    others = [each for each in by_label if getattr(config, each)]
    others += ["layer_pattern"] if config.pattern.predictions else []
    if others and not loss.counts_labels:
        raise ValueError(
            f"the loss {name} does not count labels, by which model.{others[0]}="
            f"{getattr(config, others[0])!r} is weighed: set it to 0, or leave the parts after / "
            "out of the pattern."
        )


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """Read the tokenizer of a run. Raise ValueError if there is none."""
    folder = model_folder(recipe.tokenizer)
    if find_tokenizer(folder) is None:
        raise ValueError(
            f"tokenizer is {recipe.tokenizer!r}, but there is no tokenizer.json in {folder}. Name "
            "the folder of a tokenizer, or 'demo'."
        )
    return Tokenizer.from_folder(folder)


def model_config_of(recipe: Recipe, tokenizer: Tokenizer) -> HybridConfig:
    """Return the config of the model that a run trains. Raise ValueError if it does not fit the
    tokenizer."""
    # A micro-batch counts by its labels; core's data parallelism and our routers read this field.
    counting = {"calculate_per_token_loss": True}
    pretrained = recipe.model.get("pretrained")
    if pretrained is None:
        config = recipe.model_config(tokenizer.vocab_size, **counting)
        if config.use_cpu_initialization and recipe.splits_model:
            config.perform_initialization = False  # see `draw_as_one_rank`
    else:
        fields = {**decode_fields(recipe.model), **counting}
        del fields["pretrained"]
        config = read_config(model_folder(pretrained), perform_initialization=False, **fields)
    if config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {config.vocab_size}, but {recipe.tokenizer!r} has "
            f"{tokenizer.vocab_size} tokens. Leave model.vocab_size out, or name the tokenizer of "
            "the model."
        )
    return config
