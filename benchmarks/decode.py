"""One decode step on the CPU, and that of the same weights in transformers.

A forward is a tape (`ops.tape`). What bounds batch 1: products (`ops.linear`) take half of a step
and as long as theirs (0.6 of that at 4 and 8), scheduling, layout, draws and a look at all weights
a seventh, and attention, which gathers pages and pads queries to four rows, another sixth.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.common import Row, median_ratio, paired, seconds
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_hybrid.checkpoints.pretrained import load_pretrained

PROMPT, STEPS = 64, 100
BATCHES = (1, 4, 8)
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODELS: dict[str, dict] = {
    "Llama": {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "intermediate_size": 704,
        **ATTENTION,
    },
    "Nemotron-H": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"] * 2,
        "intermediate_size": 704,
        "ssm_state_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        **ATTENTION,
    },
    "Qwen3-Next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "intermediate_size": 704,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 0,
        "mlp_only_layers": list(range(8)),
        **ATTENTION,
    },
    "Mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 8,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 2,
        "state_size": 64,
    },
}
"""Eight layers, or blocks, 256 wide."""


def run() -> Iterator[Row]:
    """The ratio of whole decode steps on one thread: of the engine, with scheduling, sampling and
    commit, and of a bare greedy loop over transformers' forward. They take turns step by step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, values in MODELS.items():
            with tempfile.TemporaryDirectory() as folder:
                theirs = their_model(values)
                theirs.save_pretrained(folder)
                ours, _ = load_pretrained(folder, "cpu")
            for batch in BATCHES:
                prompts = np.random.default_rng(batch).integers(3, 4096, (batch, PROMPT))
                a, b = step_times(ours, theirs, prompts)
                yield Row(
                    f"decode step of {name}, batch {batch} / transformers' forward and argmax",
                    f"{median_ratio(a, b):.2f}  ({statistics.median(a) * 1e3:.2f} / "
                    f"{statistics.median(b) * 1e3:.2f} ms)",
                    "<= 1.0",
                )
    finally:
        torch.set_num_threads(threads)


def their_model(values: dict):
    """A random model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"hidden_size": 256, "vocab_size": 4096, "tie_word_embeddings": False, **values}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.pad_token_id, config.eos_token_id = 0, None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def step_times(ours, theirs, prompts: np.ndarray) -> tuple[list[float], list[float]]:
    """Seconds of each decode step of the engine and of transformers, all prompts running."""
    config = InferenceConfig(cache_bytes=64 << 20, max_requests=8, max_sequence_length=1024)
    params = SamplingParams(top_k=1, num_tokens_to_generate=STEPS + 8)
    with DynamicInferenceEngine(ours, None, config) as engine:
        requests = [engine.add_request(prompt.tolist(), params) for prompt in prompts]
        while not all(request.first_token_at for request in requests):
            engine.step()
        step = greedy_loop(theirs, prompts)
        return paired(lambda: seconds(engine.step), lambda: seconds(step), STEPS)


def greedy_loop(model, prompts: np.ndarray) -> Callable[[], None]:
    """Runs the prompts through transformers; returns what runs one more token of each."""
    with torch.inference_mode():
        output = model(torch.from_numpy(prompts), use_cache=True)
    # Newest name first; earlier ones are a release's or a model's own.
    name = next(key for key in ("cache", "past_key_values", "cache_params") if key in output)

    @torch.inference_mode()
    def step() -> None:
        nonlocal output
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        output = model(tokens, **{name: output[name]}, use_cache=True)

    return step
