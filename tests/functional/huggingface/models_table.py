"""The tables in docs/reference/models.md: of each tiny model, made by the test run, and of each
released one, with what a checkpoint for Megatron holds of it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from pathlib import Path

from huggingface import CONFIGS, kept_names, read_values
from test_packed_folders import PAIRS

from megatron_hybrid.checkpoints.megatron.args import args_of_config
from megatron_hybrid.inference.memory.cache_pool import cache_spec_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.tools.plan import read_model_config

TABLE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
_MEGATRON = "<!-- table of Megatron: made by `make models-table` -->", "<!-- end of Megatron -->"
_START, _END = "<!-- table: made by `make models-table` -->", "<!-- end of table -->"

CALLS = {
    "bailing": "hermes",
    "command_r7b": "cohere_command4",
    "deepseek": "deepseek_v3, deepseek_v31",
    "ernie": "ernie45",
    **dict.fromkeys(("gemma_2", "gemma_3", "recurrentgemma"), "none"),
    "gemma_4": "gemma4",
    "glm4_moe": "glm45",
    "gpt_oss": "openai",
    "granite": "granite",
    "granite_3b_code": "",
    "granite_4": "granite4",
    "hunyuan": "hunyuan_a13b",
    "jamba": "jamba",
    "kimi": "kimi_k2",
    "lfm2": "lfm2",
    "llama_3": "llama3_json",
    "llama_4": "llama4_json, llama4_pythonic",
    "mimo_v2": "qwen3_coder",
    "minimax": "minimax_m1",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral, mistral_names",
    "ministral": "mistral_names",
    "nemotron_3": "qwen3_coder",
    "nemotron_h_puzzle": "qwen3_coder",
    "olmo3": "olmo3",
    "qwen": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_next": "hermes, qwen3_coder",
    "seed_oss": "seed_oss",
    "step_3": "step3",
    "step_3_5": "qwen3_coder",
}
"""How names of models begin -> dialects of their releases, the longest counts; none: no tools."""
PACKED = {"gpt_oss": {"mxfp4"}, "llama": {"all"}}
for tiny, formats in PAIRS.items():
    PACKED.setdefault(read_values(tiny)["model_type"], set()).update(formats.values())


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


def released_rows(folder: Path) -> list[str]:
    """Each released model, and the tiny one of each other architecture, with what comes of it in
    each direction, as a row in Markdown."""
    rows, types = [], set()
    tiny = [CONFIGS / f"{name}.json" for name in kept_names(())]
    for path in [*sorted(folder.glob("*.json")), *tiny]:
        config = read_model_config(path, mtp=True)
        model_type = config.huggingface_config["model_type"]
        if path in tiny and model_type.removesuffix("_text") in types:
            continue
        types.add(model_type.removesuffix("_text"))
        try:
            args = args_of_config(config)
        except ValueError as error:
            cells = "no", str(error)
        else:
            kind = "HybridModel" if args.is_hybrid_model else "GPTModel"
            kept = ["with its MTP head"] if config.pattern.predictions else []
            kept += ["by megatron-core 0.17 and newer"] if hasattr(args, "use_mup") else []
            if config.mamba_num_groups == 1 and "M" in config.pattern.symbols:
                kept.append("core does not split its one group over TP ranks")
            cells = f"both ways, {kind}", "; ".join(kept)
        begins = max((name for name in CALLS if path.stem.startswith(name)), key=len, default="")
        packed = sorted(PACKED.get(model_type) or PACKED.get(model_type.removesuffix("_text"), ()))
        cells = CALLS.get(begins, ""), ", ".join(packed), *cells
        rows.append(f"| {path.stem} | {model_type} | both ways | {' | '.join(cells)} |")
    return rows


def write_released(page: Path, folder: Path) -> None:
    """Puts the rows of all released models in place of the table's."""
    names = (
        "model | model_type | Hugging Face | calls | packed | Megatron | why not, or what is kept"
    )
    lines = [f"| {names} |", f"|{' --- |' * 7}", *released_rows(folder)]
    _write(page, *_MEGATRON, lines)


def read_released(page: Path) -> list[str]:
    """The rows of that table."""
    start, end = _MEGATRON
    table = page.read_text(encoding="utf-8").split(start)[1].split(end)[0]
    return table.strip().splitlines()[2:]


def _write(path: Path, start: str, end: str, lines: list[str]) -> None:
    before, rest = path.read_text(encoding="utf-8").split(start)
    _, after = rest.split(end)
    path.write_text(before + "\n".join([start, *lines, end]) + after, encoding="utf-8")


def write_rows(path: Path, rows: list[Row]) -> None:
    """Puts rows in place of the table's."""
    names = [field.name.replace("_", " ") for field in fields(Row)]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---" for _ in names) + " |"]
    lines += ["| " + " | ".join(map(str, astuple(row))) + " |" for row in rows]
    _write(path, _START, _END, lines)


def read_rows(path: Path) -> list[Row]:
    """The rows of the table."""
    table = path.read_text(encoding="utf-8").split(_START)[1].split(_END)[0]
    cells = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return [Row(*row[:5], int(row[5]), int(row[6])) for row in cells]
