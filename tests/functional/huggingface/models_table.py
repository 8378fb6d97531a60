"""The table in docs/reference/models.md: one row for each tiny model, made by the test run."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from pathlib import Path

from megatron_hybrid.inference.memory.cache_pool import cache_spec_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.layer_pattern import LAYER_KINDS

TABLE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
_START, _END = "<!-- table: made by `make models-table` -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Row:
    """What the run of one tiny model showed."""

    name: str
    pattern: str
    layer_kinds: str
    largest_error: str
    error_of_transformers: str
    state_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, name: str, model: HybridModel, errors: tuple[str, str]) -> Row:
        """The row of a model. errors: the largest of its logits, and of those of transformers."""
        config = model.config
        spec = cache_spec_of(
            model.cache_requirements(), config.hidden_size, config.params_dtype, 16
        )
        symbols = dict.fromkeys(config.pattern.symbols)
        return cls(
            name,
            f"`{config.layer_pattern}`",
            ", ".join(LAYER_KINDS[symbol].meaning for symbol in symbols),
            *errors,
            spec.state_bytes,
            sum(group.num_layers * group.bytes_per_token for group in spec.groups),
        )


def merge_rows(path: Path, rows: list[Row], names: list[str]) -> None:
    """Puts rows in place of the table's of the same names, so that a run of some models leaves the
    others as they were. names: of all models, in order; rows of others go."""
    known = {row.name: row for row in [*read_rows(path), *rows]}
    write_rows(path, [known[name] for name in names if name in known])


def write_rows(path: Path, rows: list[Row]) -> None:
    """Puts rows in place of the table's."""
    names = [field.name.replace("_", " ") for field in fields(Row)]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    lines += ["| " + " | ".join(map(str, astuple(row))) + " |" for row in rows]
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(_START)
    _, after = rest.split(_END)
    path.write_text(before + "\n".join([_START, *lines, _END]) + after, encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """The rows of the table."""
    table = path.read_text(encoding="utf-8").split(_START)[1].split(_END)[0]
    cells = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return [Row(*row[:5], int(row[5]), int(row[6])) for row in cells]
