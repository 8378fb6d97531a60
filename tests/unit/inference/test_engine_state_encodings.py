"""Encodings of checkpoints: which bytes they take, and what a restore from them does."""

import math

import numpy as np
import pytest
import torch
from matrix import matrix_rows
from reference import VOCAB_SIZE, random_tokens, tiny_engine, tiny_model

from megatron_hybrid import HybridConfig, SamplingParams, build_hybrid_model
from megatron_hybrid.inference.config import STATE_ENCODINGS
from megatron_hybrid.inference.memory.cache_pool import CachePool, cache_spec_of

PATTERNS = {
    "Mamba-2": "M-*-",
    "Mamba-1": "S-*-",
    "GDN": "G-*-",
    "KDA": "K-*-",
    "convolution": "C-*-",
    "parallel heads": "H-*-",
    "linear recurrent units": "U-U-",
    "shared blocks": "Z-Z-",
    "all": "MGSKC*-W-",
}


def memory_of(model, encoding: str, num_pages: int = 40) -> CachePool:
    layers, hidden_size = model.cache_requirements(), model.config.hidden_size
    spec = cache_spec_of(layers, hidden_size, torch.float32, 16, encoding)
    device = torch.device("cpu")
    return CachePool(
        spec, layers, hidden_size, torch.float32, num_pages, 3, device, state_encoding=encoding
    )


def parts(memory: CachePool, model) -> dict[tuple[int, str], tuple[torch.Tensor, bool]]:
    """Every state in every slot, and whether an encoding may round it."""
    return {
        (number, state.name): (memory.state(number, state.name), state.decay is not None)
        for number, layer in enumerate(model.cache_requirements(), start=1)
        for state in layer.states
    }


@pytest.mark.parametrize("encoding", STATE_ENCODINGS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_checkpoint_through_memory(pattern, encoding):
    """Convolution tails and the hidden state come back to the bit, recurrent states as the
    encoding says; nothing else changes."""
    model = tiny_model(pattern)
    memory = memory_of(model, encoding)
    generator = torch.Generator().manual_seed(0)
    for view, _ in parts(memory, model).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    memory.hidden().copy_(torch.randn(memory.hidden().shape, generator=generator))
    before, pool = memory.slots.clone(), memory.pool.clone()
    pages = np.random.default_rng(0).permutation(np.arange(1, 40))
    pages = pages[: memory.spec.checkpoint_pages].astype(np.int32)
    memory.save_checkpoint(memory.slots[1], pages)
    assert torch.equal(memory.slots, before)
    others = np.setdiff1d(np.arange(40), pages)
    assert torch.equal(memory.pool[others], pool[others])
    memory.slots.fill_(255)
    memory.load_checkpoint(pages, 2)
    assert (memory.slots[:2] == 255).all()

    restored = memory.slots.clone()
    memory.slots.copy_(before)
    kept = {key: view[1].clone() for key, (view, _) in parts(memory, model).items()}
    hidden = memory.hidden()[1].clone()
    memory.slots.copy_(restored)
    assert torch.equal(memory.hidden()[2], hidden)
    for key, (view, may_be_rounded) in parts(memory, model).items():
        if encoding == "exact" or not may_be_rounded:
            assert torch.equal(view[2], kept[key]), key
        elif encoding == "bf16":
            assert torch.equal(view[2], kept[key].bfloat16().float()), key
        else:
            assert 0 < (view[2] - kept[key]).norm() / kept[key].norm() < 0.01, key


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_bytes_of_a_checkpoint(pattern):
    model = tiny_model(pattern)
    states = [state for layer in model.cache_requirements() for state in layer.states]
    specs = {encoding: memory_of(model, encoding).spec for encoding in STATE_ENCODINGS}
    assert len({spec.state_bytes for spec in specs.values()}) == 1  # live slots are exact
    assert specs["exact"].checkpoint_bytes == specs["exact"].state_bytes + 64 * 4

    def aligned(size):
        return -(-size // 16) * 16

    tails = sum(aligned(math.prod(s.shape) * 4) for s in states if s.decay is None)
    rounded = [s.shape for s in states if s.decay is not None]
    assert specs["bf16"].encoded_state_bytes == tails + 2 * sum(map(math.prod, rounded))
    assert specs["int8"].encoded_state_bytes == tails + sum(map(math.prod, rounded))


def test_a_state_that_is_bf16_already_is_not_rounded_by_bf16():
    model = tiny_model("M-", recurrent_state_dtype=torch.bfloat16)
    specs = {encoding: memory_of(model, encoding).spec for encoding in STATE_ENCODINGS}
    assert specs["bf16"].checkpoint_bytes == specs["exact"].checkpoint_bytes
    states = math.prod(model.cache_requirements()[0].states[1].shape)
    assert specs["exact"].checkpoint_bytes - specs["int8"].checkpoint_bytes == states


def long_memory_model(pattern: str):
    """A random model with heads of 64 x 64 that forget at rates from 0.2 to 0.999 a token, and
    logits that are far apart: what is in its states shows."""
    torch.manual_seed(0)
    config = HybridConfig(
        layer_pattern=pattern,
        hidden_size=128,
        num_attention_heads=4,
        vocab_size=VOCAB_SIZE,
        ffn_hidden_size=128,
        mamba_head_dim=64,
        mamba_state_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        init_method_std=0.1,
    )
    model = build_hybrid_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                dt = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                parameter.copy_(dt + (-torch.expm1(-dt)).log())
            elif "output_layer" in name:
                parameter.mul_(4 / (parameter.std() * math.sqrt(parameter.shape[1])))
    return model


def logits_after_restores(model, encoding: str, prompts: int = 4, answers: int = 7):
    """Logits [prompts * answers, V] behind prompts with 1, 2, ... tokens more, all of them resumed
    from the checkpoint at the end of their prompt."""
    engine = tiny_engine(model, state_encoding=encoding)
    recorded, forward = [], engine.runner.forward

    def recording(plan):
        logits_nV = forward(plan)
        recorded.append(logits_nV)
        return logits_nV

    nothing = SamplingParams(num_tokens_to_generate=0)
    for seed in range(prompts):
        prompt = random_tokens(60 + 5 * seed, seed)
        engine.runner.forward = forward
        engine.generate([prompt], nothing)
        engine.runner.forward = recording
        for n in range(answers):
            # A first token of its own, so that none goes on from another's checkpoint.
            (result,) = engine.generate([[*prompt, n, *random_tokens(3 * n, seed=n)]], nothing)
            assert result.prefix.skipped_tokens == len(prompt)
    engine.check_integrity()
    return torch.cat(recorded).double()


def kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    exact, other = exact.log_softmax(-1), other.log_softmax(-1)
    return float((exact.exp() * (exact - other)).sum(-1).mean())


# The 16 states of a Mamba-1 channel leave little to exploit.
BOUNDS = {"M-M-": 2, "G-G-": 2, "K-K-": 2, "H-H-": 2, "Z-Z-": 2, "MGSK*": 2, "S-S-": 5}


@pytest.mark.parametrize(
    ("pattern", "bound"),
    matrix_rows(BOUNDS.items(), ("MGSK*", 2)),
)
def test_a_restore_from_int8_is_about_as_exact_as_one_from_bf16(pattern, bound):
    model = long_memory_model(pattern)
    exact, *lossy = (logits_after_restores(model, encoding) for encoding in STATE_ENCODINGS)
    bf16, int8 = (kl(exact, logits) for logits in lossy)
    assert 0 < bf16 < 1e-4
    assert 0 < int8 <= bound * bf16
