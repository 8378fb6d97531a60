"""How much memory does a request of 100,000 tokens take? KV and states by the config.json files of
published models, as `megatron-hybrid plan` counts them; no model runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.questions.common import aligned
from megatron_hybrid.tools.plan import plan, read_model_config
from megatron_hybrid.tools.roofline import DEVICES
from megatron_hybrid.utils.tables import GB

CONFIGS = Path(__file__).parents[2] / "tests" / "functional" / "huggingface" / "hub_configs"
MODELS = (
    ("Mamba-Codestral-7B", "mamba_codestral_7b"),
    ("Nemotron-H-8B", "nemotron_h_8b"),
    ("Jamba-1.5-Mini", "jamba_1_5_mini"),
    ("Qwen3.5-4B", "qwen3_5_4b"),
    ("Gemma-3-27B", "gemma_3_27b"),
    ("Llama-3.1-8B", "llama_3_1_8b"),
)
CONTEXT = 100_000


def run(models: Sequence[tuple[str, str]] = MODELS, context: int = CONTEXT) -> Iterator[str]:
    """The lines of the table."""
    rows = [("model", "KiB/token", "KV, GB", "windows, GB", "states, GB", "all, GB", "on H200")]
    memory = DEVICES["h200"].memory_bytes
    for name, file in models:
        found = plan(read_model_config(CONFIGS / f"{file}.json"), memory, context).model
        kv = found.kv_bytes_per_token * context
        states = found.state_bytes
        together = kv + found.window_bytes + states
        rows.append(
            (
                name,
                f"{found.kv_bytes_per_token / 1024:.0f}",
                f"{kv / GB:.2f}",
                f"{found.window_bytes / GB:.2f}",
                f"{states / GB:.3f}",
                f"{together / GB:.2f}",
                found.largest_batch,
            )
        )
    yield f"one request of {context:,} tokens; on H200: as many fit next to weights in bf16"
    yield from aligned(rows)
