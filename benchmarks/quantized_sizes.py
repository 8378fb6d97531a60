"""Which released models fit on which GPU, by the format of their weights: the table of
docs/guides/quantized_weights.md.

    python -m benchmarks.quantized_sizes
"""

from pathlib import Path

from megatron_hybrid.tools.plan import plan, read_model_config
from megatron_hybrid.tools.roofline import DEVICES
from megatron_hybrid.utils.tables import GB

DOCS = Path(__file__).parents[1] / "docs" / "guides" / "quantized_weights.md"
CONFIGS = Path(__file__).parents[1] / "tests" / "functional" / "huggingface" / "hub_configs"
BEGIN, END = "<!-- sizes: begin -->\n", "<!-- sizes: end -->"
MODELS = (
    "nemotron_h_8b",
    "gpt_oss_20b",
    "gemma_3_27b",
    "nemotron_3_nano_30b_a3b",
    "granite_4_0_h_small",
    "qwen3_5_35b_a3b",
    "kimi_linear_48b_a3b",
    "qwen3_next_80b_a3b",
    "minimax_m2",
)
FORMATS = (None, "fp8", "nvfp4", "int4")
CONTEXT = 8_000


def table() -> str:
    """The table, in Markdown."""
    names = [name or "bf16" for name in FORMATS]
    lines = [
        f"| model | GB: {' / '.join(names)} | requests on an h100 | on an h200 |",
        "| --- | --- | --- | --- |",
    ]
    for model in MODELS:
        config = read_model_config(CONFIGS / f"{model}.json")
        sizes, cells = [], []
        for device in ("h100", "h200"):
            memory = DEVICES[device].memory_bytes
            plans = [plan(config, memory, CONTEXT, weights=name) for name in FORMATS]
            sizes = [f"{each.weight_bytes / GB:.1f}" for each in plans]
            cells.append(" / ".join(str(each.model.largest_batch or "-") for each in plans))
        lines.append(f"| {model} | {' / '.join(sizes)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCS.write_text(before + BEGIN + table() + END + rest.split(END, 1)[1], encoding="utf-8")
