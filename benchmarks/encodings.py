"""What encodings of states cost: KL(exact restore || encoded restore) of the tokens that follow."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.restores import Restores, divergence
from benchmarks.state_roundings import ROUNDINGS
from megatron_hybrid import HybridConfig, build_hybrid_model, load_pretrained
from megatron_hybrid.ops import StatesCodec

RESTORES, TOKENS, VOCAB_SIZE = 24, 48, 1024
TEXT = Path(__file__).parents[1] / "tests/functional/data/alice_chapter_5.txt"
RANDOM_MODELS = {
    "Mamba-2": ("M-M-M-M-", 64),
    "GDN": ("G-G-G-G-", 64),
    "GDN, 128": ("G-G-G-G-", 128),
    "KDA": ("K-K-K-K-", 64),
    "KDA, 128": ("K-K-K-K-", 128),
    "Mamba-1": ("S-S-S-S-", 64),
}


def run() -> Iterator[Row]:
    """Measure for each model the KL of bf16, then how many times as large others are."""
    yield from _rows("demo", demo_restores())
    for name, (pattern, key_dim) in RANDOM_MODELS.items():
        yield from _rows(name, random_restores(pattern, key_dim))


def demo_restores() -> Restores:
    """The demo model, cut at 24 places of a chapter that it has not seen."""
    model, tokenizer = load_pretrained("demo", dtype=torch.float32)
    tokens = np.array(tokenizer.tokenize(TEXT.read_text(encoding="utf-8")))
    return _restores(model, 100, 1000, lambda rng, n: _piece(rng, tokens, n))


def _piece(rng: np.random.Generator, tokens: np.ndarray, length: int) -> np.ndarray:
    first = rng.integers(len(tokens) - length)
    return tokens[first : first + length]


def random_restores(pattern: str, key_dim: int) -> Restores:
    """Random weights. Decays are spread as in the authors' initialisations, from 0.2 to 0.999 a
    token, and logits are far enough apart for an entropy of 2.3 nats."""
    torch.manual_seed(0)
    config = HybridConfig(
        layer_pattern=pattern,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        vocab_size=VOCAB_SIZE,
        mamba_head_dim=64,
        mamba_state_dim=128,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=key_dim,
        linear_num_key_heads=256 // key_dim,
        linear_num_value_heads=256 // key_dim,
        init_method_std=0.06,
    )
    model = build_hybrid_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                dt = (torch.rand(parameter.shape) * math.log(100) + math.log(1e-3)).exp()
                parameter.copy_(dt + (-torch.expm1(-dt)).log())
            elif "output_layer" in name:
                parameter.mul_(4 / (parameter.std() * math.sqrt(parameter.shape[1])))
    weights = 1 / np.arange(1, VOCAB_SIZE + 1)  # Zipf's law
    weights /= weights.sum()
    return _restores(model, 100, 600, lambda rng, n: rng.choice(VOCAB_SIZE, n, p=weights))


def _restores(model, shortest: int, longest: int, tokens_of: Callable) -> Restores:
    rng = np.random.default_rng(0)
    positions = rng.integers(shortest, longest, RESTORES).tolist()
    sequences = [tokens_of(rng, position + TOKENS) for position in positions]
    return Restores(model, sequences, positions, TOKENS)


Rounding = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""(states of a sequence, their decays) -> the states as they come back."""


def _rows(model: str, restores: Restores) -> Iterator[Row]:
    states, decays = restores.states(), list(restores.decays().values())
    exact = restores.log_probs(states)

    def measure(rounding: Rounding) -> tuple[float, float]:
        rounded = [rounding(list(sequence), decays) for sequence in zip(*states.values())]
        batches = map(torch.stack, zip(*rounded))
        kl = divergence(exact, restores.log_probs(dict(zip(states, batches))))
        return kl.mean().item(), kl.quantile(0.99).item()

    mean, tail = measure(_each(lambda state: state.bfloat16().float()))
    yield Row(f"{model}: bf16, mean / 99th percentile", f"{mean:.1e} / {tail:.1e}")
    for name, (rounding, goal) in _ENCODINGS.items():
        its_mean, its_tail = measure(rounding)
        yield Row(f"{model}: {name}", f"{its_mean / mean:.2f} x / {its_tail / tail:.2f} x", goal)


def _each(rounding: Callable[[Tensor], Tensor]) -> Rounding:
    return lambda states, decays: [rounding(state) for state in states]


def _codec(lasting: bool = True, together: bool = True, **options) -> Rounding:
    def rounding(states: list[Tensor], decays: list[Tensor]) -> list[Tensor]:
        decays = [decay * lasting for decay in decays]
        if not together:
            pairs = zip(states, decays)
            return [through([state], [decay])[0] for state, decay in pairs]
        return through(states, decays)

    def through(states: list[Tensor], decays: list[Tensor]) -> list[Tensor]:
        codec = StatesCodec([state.shape for state in states], decays, **options)
        return codec.decode(codec.encode(states))

    return rounding


_ENCODINGS = {
    "int8": (_codec(), "<= 2 x"),
    "int8, each layer by itself": (_codec(together=False), ""),
    "int8 without low rank": (_codec(max_rank=0), ""),
    "int8 blind to decays": (_codec(lasting=False), ""),
    "int8 without all three": (_codec(lasting=False, together=False, max_rank=0), ""),
    "the same in 6 bits": (_codec(bytes_per_element=6 / 8), ""),
    "the same in 4 bits": (_codec(bytes_per_element=4 / 8), ""),
    **{name: (_each(rounding), "") for name, rounding in ROUNDINGS.items()},
}
