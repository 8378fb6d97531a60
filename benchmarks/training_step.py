"""A training step: forward, backward and AdamW, of our models against those of transformers; of a
Trainer against a plain loop; what recomputation saves, and for how long a save holds the training.

Times are medians of ratios of steps in turn. Memory is what autograd keeps for the backward pass.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import Row, benchmark_model, median_ratio, paired, seconds
from megatron_hybrid import HybridConfig, build_hybrid_model, load_pretrained
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.trainer import Trainer, training_device

ROUNDS, BATCH, LENGTH, VOCAB_SIZE = 7, 4, 512, 4096
LEARNING_RATE = 1e-4
COMMON = {"hidden_size": 256, "vocab_size": VOCAB_SIZE, "intermediate_size": 704}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODELS = {
    "Mamba2": {
        "model_type": "mamba2",
        "hidden_size": 256,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 6,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "Nemotron-H": {
        **COMMON,
        **ATTENTION,
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp"] * 4 + ["full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "chunk_size": 64,
    },
    "Qwen3-Next": {
        **COMMON,
        **ATTENTION,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "Llama": {**COMMON, **ATTENTION, "model_type": "llama", "num_hidden_layers": 8},
}
"""config.json of models of transformers, of a width of 256."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""(tokens, labels) -> the mean loss."""


def run() -> Iterator[Row]:
    for name, values in MODELS.items():
        yield from _against_transformers(name, values)
    yield from _in_a_trainer()


def _against_transformers(name: str, values: dict) -> Iterator[Row]:
    torch.manual_seed(0)
    values = dict(values)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values)
    )
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = load_pretrained(folder)

    def their_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = theirs(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    kept = [saved_bytes(*pair) for pair in ((_loss_of(ours), ours), (their_loss, theirs))]
    steps = [_step(_loss_of(ours), ours.train()), _step(their_loss, theirs.train())]
    yield from _rows(f"{name}: ours / transformers", *paired(*steps, ROUNDS))
    yield Row(f"{name}: kept for backward", _ratio_of_mib(kept))


def _loss_of(model: nn.Module) -> Loss:
    return lambda tokens, labels: model(tokens, labels=labels).mean()


def _rows(what: str, a: list[float], b: list[float], goal: str = "") -> Iterator[Row]:
    a_ms, b_ms = (1000 * sorted(times)[len(times) // 2] for times in (a, b))
    yield Row(f"{what}, time", f"{median_ratio(a, b):.2f} x ({a_ms:.0f} / {b_ms:.0f} ms)", goal)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, [BATCH, LENGTH]."""
    rows = torch.randint(0, VOCAB_SIZE, (BATCH, LENGTH + 1))
    return rows[:, :-1], rows[:, 1:].contiguous()


def _step(loss: Loss, model: nn.Module) -> Callable[[], float]:
    """Seconds of one step of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tokens, labels = batch()

    def step() -> None:
        optimizer.zero_grad()
        loss(tokens, labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return lambda: seconds(step)


def saved_bytes(loss: Loss, model: nn.Module) -> int:
    """Bytes of what a forward pass keeps for the backward pass, parameters aside."""
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in model.state_dict().values()
        if isinstance(tensor, Tensor)
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(*batch())
    value.backward()
    model.zero_grad()
    return sum(kept.values())


def _in_a_trainer() -> Iterator[Row]:
    """A recipe's steps, on megatron-core's data parallelism (of one rank), schedule, clipping and
    Adam, against a plain loop; what recomputation keeps and costs; how long a save holds a step."""
    with tempfile.TemporaryDirectory() as name, training_device() as device:
        folder = Path(name)
        fields = {**benchmark_model().config.to_dict(), "vocab_size": VOCAB_SIZE}
        model = build_hybrid_model(HybridConfig.from_dict(fields)).train()
        recipe = _recipe(folder, fields)
        trainer = Trainer(recipe, folder / "run", device)
        plain = _step(_loss_of(model), model)
        data = trainer.batches()
        step = lambda: seconds(lambda: trainer.step(data))  # noqa: E731
        yield from _rows("Hybrid: Trainer / plain loop", *paired(step, plain, ROUNDS), "<= 1.10 x")

        recompute = {"recompute_granularity": "full", "recompute_method": "uniform"}
        config = HybridConfig.from_dict(fields, **recompute, recompute_num_layers=1)
        recomputing = build_hybrid_model(config).train()
        losses = [
            lambda tokens, labels, one=one: one(tokens, labels=labels).mean()
            for one in (recomputing, model)
        ]
        kept = [saved_bytes(loss, one) for loss, one in zip(losses, (recomputing, model))]
        times = paired(
            *(_step(loss, one) for loss, one in zip(losses, (recomputing, model))), ROUNDS
        )
        yield from _rows("Hybrid: recompute / none", *times)
        yield Row("Hybrid: kept, recompute / none", _ratio_of_mib(kept))

        for what in ("asynchronous", "synchronous"):
            trainer.checkpoints.asynchronous = what == "asynchronous"
            trainer.save()  # the first one starts a process
            trainer.checkpoints.finish()
            stall = statistics.median(_stall(trainer, data) for _ in range(ROUNDS))
            size = sum(path.stat().st_size for path in (folder / "run").rglob("*.distcp"))
            share = stall / statistics.median(step() for _ in range(3))
            yield Row(
                f"{what} save, {size / 2**20:.0f} MiB: stall",
                f"{1000 * stall:.0f} ms ({share:.2f} steps)",
            )


def _stall(trainer: Trainer, data: Iterator[Batch]) -> float:
    """Seconds for which a save holds the training, its completion included."""
    trainer.step(data)
    held = seconds(trainer.save)
    while trainer.checkpoints.finish(wait=False):
        time.sleep(0.01)
        held += seconds(lambda: trainer.checkpoints.finish(wait=False))
    return held


def _recipe(folder: Path, model: dict) -> Recipe:
    """Make a recipe with random tokens, of the demo model's tokenizer, as data."""
    builder = IndexedDatasetBuilder(f"{folder}/tokens.bin", dtype=np.uint16)
    builder.add_item(torch.randint(1, VOCAB_SIZE // 2, (100 * BATCH * LENGTH,)))
    builder.end_document()
    builder.finalize(f"{folder}/tokens.idx")
    return Recipe.of(
        {
            "model": model,
            "tokenizer": "demo",
            "data": {
                "sequence_length": LENGTH,
                "train": [f"{folder}/tokens"],
                "reset_at_documents": False,
            },
            "run": {"steps": 1000, "micro_batch_size": BATCH, "global_batch_size": BATCH},
            "optimizer": {"learning_rate": LEARNING_RATE},
        }
    )


def _ratio_of_mib(kept: Sequence[int]) -> str:
    a, b = (number / 2**20 for number in kept)
    return f"{a / b:.2f} x ({a:.0f} / {b:.0f} MiB)"
