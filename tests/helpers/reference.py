"""What the tests compare with: tiny random models and their full forward pass without any cache."""

import functools

import numpy as np
import torch

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model

VOCAB_SIZE = 97
ALL_MIXERS = "MG*-W-"


@functools.lru_cache(maxsize=32)
def tiny_model(layer_pattern: str = ALL_MIXERS, seed: int = 0, **fields) -> HybridModel:
    """A random model whose logits are far apart, so that greedy tokens are beyond rounding."""
    torch.manual_seed(seed)
    config = HybridConfig(
        **{
            "layer_pattern": layer_pattern,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "vocab_size": VOCAB_SIZE,
            "sliding_window": 24,
            "mamba_head_dim": 16,
            "mamba_state_dim": 16,
            "mamba_chunk_size": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_chunk_size": 16,
            "attention_chunk_size": 24,
            "per_layer_input_size": 12,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 12,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            # All experts: which of two equal ones is chosen would be a matter of rounding.
            "num_moe_experts": 3,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 32,
            "moe_shared_expert_intermediate_size": None if "B" in layer_pattern else 16,
            "init_method_std": 0.1,
            **fields,
        }
    )
    with torch.inference_mode(False):  # the next test that asks for it may train it
        return build_hybrid_model(config).eval()


def fresh_model(layer_pattern: str = "MG*-", seed: int = 0, **fields) -> HybridModel:
    """As `tiny_model`, but one that no other test has."""
    return tiny_model.__wrapped__(layer_pattern, seed, **fields)


def copy_of(model: HybridModel) -> HybridModel:
    other = fresh_model(model.config.layer_pattern, params_dtype=model.config.params_dtype)
    other.load_state_dict(model.state_dict())
    return other


def tiny_engine(model: HybridModel | None = None, tokenizer=None, **fields):
    """An engine with sizes for tests."""
    config = InferenceConfig(
        **{
            "cache_bytes": 4 << 20,
            "max_requests": 8,
            "max_tokens": 512,
            "max_sequence_length": 1024,
            "warm_up": "speculation" not in fields,  # else drafts depend on times of steps
            **fields,
        }
    )
    return DynamicInferenceEngine(model or tiny_model(), tokenizer, config)


def finish(engine, *requests) -> None:
    """Run an engine until these requests are closed, or all of its work is done, and check it."""
    while not all(each.closed for each in requests) if requests else engine.has_work:
        engine.step()
    engine.check_integrity()


def random_tokens(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


@torch.no_grad()
def full_logits(model: HybridModel, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one forward pass over all tokens, without any cache; on the CPU, wherever
    the model is."""
    return model(torch.tensor([tokens], device=next(model.parameters()).device))[0].cpu()


def is_greedy(model: HybridModel, prompt: list[int], generated: list[int]) -> bool:
    """Whether `generated` is the greedy continuation of `prompt`: one full forward pass over both
    predicts each generated token from the tokens before it."""
    logits = _cached_full_logits(model, (*prompt, *generated))
    predicted = logits[len(prompt) - 1 : -1].argmax(dim=-1)
    return predicted.tolist() == list(generated)


@functools.lru_cache(maxsize=512)
def _cached_full_logits(model: HybridModel, tokens: tuple[int, ...]) -> torch.Tensor:
    return full_logits(model, list(tokens))


def greedy_tokens(model: HybridModel, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, each token from a full forward pass over all tokens before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def greedy(count: int, **fields) -> SamplingParams:
    return SamplingParams(top_k=1, num_tokens_to_generate=count, **fields)
