"""A training step: forward, backward and AdamW, of our models against those of transformers, and
against the same model under megatron-core's training code.

Times are medians of ratios of steps in turn. Memory is what autograd keeps for the backward pass.
"""

import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import Row, benchmark_model, median_ratio, paired, seconds
from megatron_hybrid import load_pretrained
from megatron_hybrid.training.cpu_seam import cpu_seam

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
    yield from _under_megatron_core()


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

    def our_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return ours(tokens, labels=labels).mean()

    kept = [saved_bytes(*pair) for pair in ((our_loss, ours), (their_loss, theirs))]
    steps = [_step(our_loss, ours.train()), _step(their_loss, theirs.train())]
    yield from _rows(f"{name}: ours / transformers", *paired(*steps, ROUNDS))
    mib = [number / 2**20 for number in kept]
    ratio = f"{mib[0] / mib[1]:.2f} x"
    yield Row(f"{name}: kept for backward", f"{ratio} ({mib[0]:.0f} / {mib[1]:.0f} MiB)")


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


def _under_megatron_core() -> Iterator[Row]:
    """Core's data parallelism (of one rank), schedule, clipping and Adam, against a plain loop."""
    ours, same = benchmark_model().train(), benchmark_model().train()
    plain = _step(lambda tokens, labels: ours(tokens, labels=labels).mean(), ours)
    with cpu_seam():
        yield from _rows(
            "Hybrid: megatron-core's loop / plain loop",
            *paired(_core_step(same), plain, ROUNDS),
            "<= 1.10 x",
        )


def _core_step(model: nn.Module) -> Callable[[], float]:
    config = model.config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer_config = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, clip_grad=1.0)
    overrides = get_standard_config_overrides(optimizer_config)
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], overrides)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    tokens, labels = batch()

    def forward_step(batches: Iterator, model: nn.Module) -> tuple[Tensor, Callable]:
        tokens, labels = next(batches)
        losses = model(tokens, labels=labels)
        return losses, lambda losses: (losses.mean(), {})

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([(tokens, labels)]),
            model=[wrapped],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()

    return lambda: seconds(step)
