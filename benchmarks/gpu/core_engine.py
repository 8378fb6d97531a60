"""megatron-core's own dynamic engine beside ours, on the same weights in the same run.

Both serve the parameters of one model that megatron-core built, of the sizes of Nemotron-H-8B with
fewer layers. Core's engine needs a GPU, Transformer Engine, flash-attn and, for layers of Mamba-2,
mamba_ssm: where it cannot run, its place says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Row, first_line
from benchmarks.gpu.models import cut_config, cut_model
from benchmarks.gpu.serving import first_token, make_engine, named, work_of
from megatron_hybrid import HybridModel, SamplingParams, from_megatron
from megatron_hybrid.tools.roofline import Work

CORE = "megatron-core"

PATTERNS = ("M-M-M*-M-M-M*-", "*-*-*-*-")
"""Layers; the second ones need no mamba_ssm."""


def run(bench: Bench) -> Iterator[Row]:
    """Decode steps, first tokens, and prompts that are known already."""
    for pattern in PATTERNS:
        for row in bench.guarded("does not run", _of_pattern(bench, pattern)):
            yield named(f"{pattern} of Nemotron-H-8B's sizes", row)
        bench.free()


def _of_pattern(bench: Bench, pattern: str) -> Iterator[Row]:
    sizes = bench.size(Sizes(), Sizes(length=40, batch=2, steps=2))
    core: CoreEngine | str = "needs a GPU"
    model = None
    if bench.is_cuda:
        try:
            stock = stock_model(pattern, sizes)
            core, model = CoreEngine(bench, stock, sizes), from_megatron(stock)
        except Exception as error:  # of whatever kind: it is not ours
            core = first_line(error)
    ours = OurEngine(bench, model or cut_model("nemotron_h_8b", bench, pattern), sizes)
    yield from compare(bench, ours, core, sizes)
    ours.engine.close()


@dataclass(frozen=True)
class Sizes:
    """What both engines run."""

    length: int = 2048
    """Tokens of a prompt."""
    batch: int = 16
    steps: int = 20


def compare(bench: Bench, ours: OurEngine, other: Engine | str, sizes: Sizes) -> Iterator[Row]:
    """Rows of two engines, in turn.

    Args:
        other: of the same model; or why there is none.
    """
    engines = {"megatron_hybrid": ours} | ({} if isinstance(other, str) else {CORE: other})
    rng = np.random.default_rng(0)

    def prompts(count: int) -> list[list[int]]:
        return rng.integers(0, ours.vocab_size, (count, sizes.length)).tolist()

    for what, given in (
        ("unknown prompt", prompts(4)),
        ("known prompt", prompts(1) * 4),  # the first one of a row is not counted
    ):
        times = {
            name: statistics.median([engine.first_token(prompt) for prompt in given][1:])
            for name, engine in engines.items()
        }
        yield _row(f"first token, {what} of {sizes.length:,}", times, other)
    given = prompts(sizes.batch)
    times = {
        name: statistics.median(engine.decode_steps(given, sizes.steps))
        for name, engine in engines.items()
    }
    bound = bench.bound(ours.decode_work(sizes))
    yield _row(f"decode step, batch {sizes.batch}", times, other, bound)


def _row(
    what: str, times: dict[str, float], other: Engine | str, bound: float | None = None
) -> Row:
    return Row(
        what,
        times["megatron_hybrid"],
        bound,
        {CORE: other if isinstance(other, str) else times[CORE]},
    )


class Engine(Protocol):
    """The calls that are compared."""

    vocab_size: int

    def first_token(self, prompt: list[int]) -> float:
        """Seconds of a request of one token that is alone."""

    def decode_steps(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Seconds of each of so many steps with all requests in decode."""


class OurEngine:
    """This project's engine."""

    def __init__(self, bench: Bench, model: HybridModel, sizes: Sizes):
        self.bench = bench
        self.engine = make_engine(bench, model, 2 * sizes.length, sizes.batch)
        self.vocab_size = model.config.vocab_size

    def first_token(self, prompt: list[int]) -> float:
        """See `Engine`."""
        return first_token(self.bench, self.engine, prompt)

    def decode_steps(self, prompts: list[list[int]], steps: int) -> list[float]:
        """See `Engine`."""
        requests = [self.engine.add_request(prompt, _greedy(4 * steps)) for prompt in prompts]
        while any(request.first_token_at is None for request in requests):
            self.engine.step()
        self.engine.step()
        return [self.bench.wall_seconds(self.engine.step) for _ in range(steps)]

    def decode_work(self, sizes: Sizes) -> Work:
        """Of one of these steps, at least."""
        return work_of(self.engine).forward([(sizes.length + sizes.steps, 1)] * sizes.batch)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(top_k=1, num_tokens_to_generate=count, ignore_termination=True)


class CoreEngine:
    """megatron-core's engine over a model of its own.

    Raises:
        Exception: of whatever kind: it cannot be made, or does not run, here.
    """

    def __init__(self, bench: Bench, model: torch.nn.Module, sizes: Sizes):
        from megatron.core.inference.config import (
            InferenceConfig,
            MambaInferenceStateConfig,
            PrefixCachingEvictionPolicy,
        )
        from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
        from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
        from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
            GPTInferenceWrapper,
        )
        from megatron.core.inference.sampling_params import SamplingParams as CoreParams
        from megatron.core.inference.text_generation_controllers.text_generation_controller import (
            TextGenerationController,
        )

        states = MambaInferenceStateConfig.from_model(model, ssm_states_dtype=torch.float32)
        config = InferenceConfig(
            buffer_size_gb=16,  # with the states of running requests
            max_requests=sizes.batch,
            max_tokens=8192,
            max_sequence_length=2 * sizes.length,
            mamba_inference_state_config=states,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            prefix_caching_mamba_gb=None if states is None else 4.0,
        )
        context = DynamicInferenceContext(model.config, config)
        wrapped = GPTInferenceWrapper(model, context)
        controller = TextGenerationController(wrapped, _NoText(model.vocab_size))
        self.bench = bench
        self.vocab_size = model.vocab_size
        self.engine = DynamicInferenceEngine(controller, context)
        self._params = CoreParams
        self._count = 0
        self.first_token(list(range(300)))

    def _add(self, prompt: list[int], count: int) -> None:
        self._count += 1
        params = self._params(top_k=1, num_tokens_to_generate=count, termination_id=-1)
        self.engine.add_request(self._count, prompt, params)

    def first_token(self, prompt: list[int]) -> float:
        """See `Engine`."""
        self._add(prompt, 1)

        def until_done() -> None:
            while self.engine.has_unfinished_requests():
                self.engine.step_modern()

        return self.bench.wall_seconds(until_done)

    def decode_steps(self, prompts: list[list[int]], steps: int) -> list[float]:
        """See `Engine`. What does not fit into one step is computed in the next ones: as many
        steps as there are prompts are enough."""
        for prompt in prompts:
            self._add(prompt, len(prompts) + 4 * steps)
        for _ in range(len(prompts) + 1):
            self.engine.step_modern()
        return [self.bench.wall_seconds(self.engine.step_modern) for _ in range(steps)]


class _NoText:
    """What core's engine asks of a tokenizer where prompts and answers are token ids."""

    bos = eod = 0

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def detokenize(self, tokens: list[int], **options) -> str:
        return ""


def stock_model(pattern: str, sizes: Sizes) -> torch.nn.Module:
    """A hybrid model of megatron-core with random weights on the GPU.

    Raises:
        ImportError: megatron-core lacks what it needs.
    """
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel as CoreModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_hybrid.compat import activations
    from megatron_hybrid.models.sharding.parallel_setup import process_groups

    shape = cut_config("nemotron_h_8b", toy=False, pattern=pattern)
    process_groups(shape)  # initialises megatron-core
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        mamba_num_heads=shape.mamba_num_heads,
        mamba_head_dim=shape.mamba_head_dim,
        mamba_state_dim=shape.mamba_state_dim,
        mamba_num_groups=shape.mamba_num_groups,
        activation_func=activations.squared_relu,
        normalization="RMSNorm",
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = CoreModel(
        config,
        hybrid_stack_spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=2 * sizes.length,
        hybrid_layer_pattern=pattern,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model.cuda().bfloat16().eval()
