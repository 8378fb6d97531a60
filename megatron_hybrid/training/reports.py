"""Reports of a training run: lines on the terminal, a log of JSON lines, its writers, a plot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal, NamedTuple

from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.files import replace_file
from megatron_hybrid.utils.progress import Console, new_bar
from megatron_hybrid.utils.validation import Range, check_field

LOG = "log.jsonl"
WriterName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass
class ReportFields(Fields):
    """Fields of the log: its content and its intervals."""

    every_steps: Annotated[int, Range(ge=1)] = 10
    """Steps whose mean makes a line of the log."""

    writers: list[WriterName] = field(default_factory=list)
    """Trackers that get the log's numbers, too: `tensorboard` (in the run's folder), `wandb`,
    `mlflow`. Each needs the package of its name, whose own environment variables say where the run
    goes, such as WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

    peak_tflops: Annotated[float, Range(gt=0)] | None = None
    """Peak TFLOP/s of one device in the model's dtype, for the FLOPs utilisation. By default the
    value follows from the device's name (H100, H200, GH200, B200, A100); for other devices the log
    has no utilisation."""


class Reports:
    """Writes the reports of a run, on its first rank.

    Args:
        folder: that of the run.
        fields: settings of the reports.
        steps: number of all steps, for the bar.
        step: number of the steps done. Later lines of the log, of a resumed run, are removed.
        recipe: that of the run, which writers show.
        console: default stderr. Without a terminal each report is a line.

    Raises:
        ImportError, OSError: a writer lacks its package, or does not start.
    """

    def __init__(
        self,
        folder: Path,
        fields: ReportFields,
        steps: int,
        step: int,
        recipe: Mapping[str, Any],
        console: Console | None = None,
    ):
        self.path = folder / LOG
        self.console = console or Console(stderr=True, highlight=False)
        self._writers = {name: _writer(name, folder, step, recipe) for name in {*fields.writers}}
        records = read_log(self.path)
        self._sent = {(record["step"], "eval_loss" in record) for record in records}
        kept = [record for record in records if record["step"] <= step]
        self.evaluated = {record["step"] for record in kept if "eval_loss" in record}
        """Steps that have an evaluation."""
        text = "".join(json.dumps(record) + "\n" for record in kept)
        replace_file(self.path, lambda path: path.write_text(text))
        self._bar = new_bar("", steps, False, self.console)
        self._bar.update(self._bar.task_ids[0], completed=step)
        self._bar.start()

    def write(self, step: int, **values: Any) -> None:
        """Report a step.

        Args:
            step: number of the steps done.
            values: numbers by their names in the log. Numbers that are not finite are null there,
                since JSON lacks them.

        Raises:
            OSError: the log cannot be written.
        """
        line = terminal_line(step, values)
        self.evaluated |= {step} if "eval_loss" in values else set()
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise OSError(f"the log {self.path} cannot be written: {error}") from error
        numbers = {name: value for name, value in values.items() if value is not None}
        is_new = (step, "eval_loss" in values) not in self._sent
        self._tell(lambda writer: (is_new or writer.replaces) and writer.write(step, numbers))
        self._bar.update(self._bar.task_ids[0], completed=step)
        self.console.print(line, markup=False, soft_wrap=True)

    def advance(self, step: int, loss: float) -> None:
        self._bar.update(self._bar.task_ids[0], completed=step, description=f"loss {loss:.3f}")

    def close(self) -> None:
        self._bar.stop()
        self._tell(lambda writer: writer.close())

    def _tell(self, call: Callable[[Writer], Any]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                call(writer)
            except Exception as error:  # a run goes on without its tracker
                self.console.print(f"{name} is left out from now on: {error!r}", markup=False)
                del self._writers[name]


def terminal_line(step: int, values: Mapping[str, Any]) -> str:
    """Return a report in one line, with those of its numbers that `_TEXTS` names."""
    texts = {name: text(values[name]) for name, text in _TEXTS.items() if name in values}
    if "flops_utilisation" in texts:
        texts.pop("tflops_per_rank", None)
    if not values.get("skipped_steps"):
        texts.pop("skipped_steps", None)
    return "  ".join([f"step {step}", *texts.values()])


def _count(number: float) -> str:
    if number < 1e5:
        return f"{number:,.0f}"
    return f"{number / 1e3:.0f}k" if number < 999.5e3 else f"{number / 1e6:.3g}M"


def _flops(tflops: float) -> str:
    number, unit = (tflops, "TFLOP/s") if tflops >= 1 else (1e3 * tflops, "GFLOP/s")
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {unit}"


_TEXTS: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "eval_loss": "eval {:.4f}".format,
    "gradient_norm": lambda norm: f"grad {norm:{'.2f' if 0.1 <= norm < 1e3 else '.1e'}}",
    "learning_rate": "lr {:.2e}".format,
    "tokens_per_second": lambda number: f"{_count(number)} tokens/s",
    "flops_utilisation": "{:.1%} of peak".format,
    "tflops_per_rank": _flops,
    "skipped_steps": "{} skipped".format,
}
"""Numbers of a report in a line of the terminal, in this order -> their texts."""

NAMES = re.compile(
    rf"{'|'.join(_TEXTS)}|step|tokens|samples|(seq_|global_)?load_balancing_loss|z_loss|mtp_loss_\d+"
)
"""Names of the log that a user's loss cannot give to its metrics."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the records of a log, none if there is no file. A line that is not JSON, such as one
    that a crash has cut, is left out. Raise ValueError for JSON that is no report of a step."""
    records = []
    lines = path.read_bytes().splitlines() if path.exists() else ()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        check_field(f"{path}:{number}", record, dict)
        check_field(f"{path}:{number}: step", record.get("step"), int)
        records.append(record)
    return records


def plot_losses(folder: Path, picture: Path) -> None:
    """Plot training and validation losses of a run's log against the tokens read.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_log(folder / LOG)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, name, style in (
        ("loss", "training", {"lw": 1, "color": "#7aa6c2"}),
        ("eval_loss", "validation", {"lw": 1.6, "marker": "o", "ms": 3, "color": "#c0504d"}),
    ):
        points = [
            (record["tokens"] / 1e6, record[key])
            for record in records
            if record.get(key) is not None
        ]
        if points:
            axes.plot(*zip(*points), label=name, **style)
    axes.set(xlabel="tokens read (millions)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


# Writers -----------------------------------------------------------------------------------------


class Writer(NamedTuple):
    """A tracker, for one run. It may raise whatever it likes: the run goes on without it."""

    write: Callable[[int, Mapping[str, float]], Any]
    """Takes the numbers of a step, by their names in the log."""
    close: Callable[[], None]
    """Writes what is not yet written, and ends."""
    replaces: bool = False
    """Whether it replaces the numbers after the step from which a run resumes. Otherwise it keeps
    them, and gets each step once."""


def _writer(name: WriterName, *run: Any) -> Writer:
    """Start a writer, or resume the one that this run had. `run` is its folder, whose name the
    tracker shows, the number of its steps done, and its recipe."""
    try:
        return _WRITERS[name](*run)
    except ImportError as error:
        raise ImportError(
            f"reports.writers has {name!r}, which needs the package of this name: pip install "
            f"{name}, or leave it out"
        ) from error
    except Exception as error:
        offline = ", or set WANDB_MODE=offline" if name == "wandb" else ""
        raise OSError(
            f"reports.writers has {name!r}, which does not start: {str(error).rstrip('.')}. Mend "
            f"that, or leave it out{offline}."
        ) from error


def _tensorboard(folder: Path, step: int, recipe: Mapping[str, Any]) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
    add, close = events.add_scalar, events.close
    return Writer(lambda step, found: [add(*each, step) for each in found.items()], close, True)


def _wandb(folder: Path, step: int, recipe: Mapping[str, Any]) -> Writer:
    import wandb

    path = folder / "wandb_run_id"
    id = path.read_text() if path.exists() else token_hex(4)
    run = wandb.init(dir=folder, name=folder.name, id=id, resume="allow", config=dict(recipe))
    run.define_metric("*", step_metric="step")
    path.write_text(id)
    return Writer(lambda step, values: run.log({"step": step, **values}), run.finish)


def _mlflow(folder: Path, step: int, recipe: Mapping[str, Any]) -> Writer:
    import mlflow

    path = folder / "mlflow_run_id"
    found = path.read_text() if path.exists() else None
    id = mlflow.start_run(found, run_name=folder.name).info.run_id
    if found is None:
        fields = {}
        for of, each in recipe.items():
            is_section = isinstance(each, Mapping)
            fields |= {f"{of}.{n}": v for n, v in each.items()} if is_section else {of: each}
        mlflow.log_params({name: str(value)[:500] for name, value in fields.items()})
        path.write_text(id)
    log = mlflow.log_metrics
    return Writer(lambda step, found: log({**found}, step, run_id=id), mlflow.end_run)


_WRITERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
