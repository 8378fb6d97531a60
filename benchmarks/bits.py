"""Whether logits depend, in the last bit, on cuts, saved states, decodes and other requests."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.questions.common import engine_of, small_model
from megatron_hybrid import DynamicInferenceEngine, HybridModel, SamplingParams
from megatron_hybrid.inference.scheduling.step_plan import StepPlan

PATTERNS = [2 * symbol for symbol in "*WL+MSGKCAUHZEBP-"] + ["MG*-W-"]
ONE = {"mamba_chunk_size": 1, "linear_chunk_size": 1}
REQUESTS, TOKENS, LEAST_ROWS = 8, 24, 10_000
PROMPTS = (20, 300)
"""Shortest and longest, in tokens."""

COLUMNS = "prefill", "cut", "decode of 8", "decode alone", "resumed"

Rows = list[tuple[list[int], dict[int, Tensor]]]
"""Tokens of each sequence, and the logits `[V]` at some of its positions."""


def run() -> Iterator[Row]:
    """Count for each kind of layer, in fp32 and bf16, the rows of logits that are equal to the bit
    to those of a trainer's forward: by prefills, cut prefills, decodes, and after saved states."""
    for pattern in PATTERNS:
        for dtype in (torch.float32, torch.bfloat16):
            what = f"{pattern}, {str(dtype).removeprefix('torch.')}"
            yield row_of(what, random_model(pattern, dtype))
    chunks = {"mamba_chunk_size": 64, "linear_chunk_size": 32}
    for what, fields in (("in chunks of 64 and 32", chunks), ("512 wide", {"hidden_size": 512})):
        yield row_of(f"a hybrid {what}", random_model("MG*-W-", torch.float32, **fields))


def random_model(pattern: str, dtype: torch.dtype, **fields) -> HybridModel:
    """Random weights, in chunks of one token; each token goes to two of four experts."""
    sizes = {
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "sliding_window": 64,
        "attention_chunk_size": 64,
        "per_layer_input_size": 16,
        **{"mamba_head_dim": 32, "mamba_state_dim": 32},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_head_dim": 24, "qk_pos_emb_head_dim": 8},
        "v_head_dim": 32,
        **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64},
        **ONE,
        **{"init_method_std": 0.1, "params_dtype": dtype},
    }
    return small_model(pattern, **{**sizes, **fields})


def row_of(what: str, model: HybridModel) -> Row:
    rng, counts = np.random.default_rng(0), np.zeros((len(COLUMNS), 2), int)
    while counts[:, 1].sum() < LEAST_ROWS:
        counts += equal_rows(model, REQUESTS, rng)
    return Row(what, ", ".join(f"{name} {a} of {b}" for name, (a, b) in zip(COLUMNS, counts)))


def equal_rows(model: HybridModel, requests: int, rng: np.random.Generator) -> list[list[int]]:
    """[rows of logits that a trainer's forward has to the bit, all of them], by `COLUMNS`."""
    lengths = rng.integers(*PROMPTS, requests, endpoint=True).tolist()
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    plain = engine_of(model, prefix_caching="off")
    cut, resumed = engine_of(model, prefix_caching="off", max_tokens=37), engine_of(model)
    first = logits_of(resumed, prompts, TOKENS // 2)
    longer = [tokens + prompt[:20] for (tokens, _), prompt in zip(first, prompts, strict=True)]
    runs = (
        logits_of(plain, prompts, 1, return_log_probs=True),
        logits_of(cut, prompts, 1, return_log_probs=True),
        logits_of(plain, prompts, TOKENS),
        [row for prompt in prompts[:3] for row in logits_of(plain, [prompt], TOKENS)],
        logits_of(resumed, longer, TOKENS // 2),
    )
    return [[sum(equal), len(equal)] for equal in (are_equal(model, rows) for rows in runs)]


@torch.inference_mode()
def are_equal(model: HybridModel, sequences: Rows) -> list[bool]:
    equal = []
    for tokens, rows in sequences:
        logits_TV = model(torch.tensor([tokens]))[0]
        equal += [torch.equal(logits_V, logits_TV[place]) for place, logits_V in rows.items()]
    return equal


def logits_of(
    engine: DynamicInferenceEngine, prompts: list[list[int]], tokens: int, **params
) -> Rows:
    """Prompts with their greedy answers, all run side by side, and all logits that were computed.

    params: fields of SamplingParams.
    """
    found: dict[int, dict[int, Tensor]] = {}
    forward = engine.runner.forward

    def kept(plan: StepPlan) -> Tensor:
        logits_nV = forward(plan)
        rows = iter(logits_nV)
        for work in plan.work:
            end = work.start + len(work.tokens)
            for place in range(end - work.num_logits, end):
                found.setdefault(work.request_id, {})[place] = next(rows).clone()
        return logits_nV

    engine.runner.forward = kept
    sampling = SamplingParams(
        top_k=1, num_tokens_to_generate=tokens, ignore_termination=True, **params
    )
    requests = [engine.add_request(prompt, sampling) for prompt in prompts]
    while engine.has_work:
        engine.step()
    engine.runner.forward = forward
    return [(each.tokens[: each.num_tokens].tolist(), found[each.request_id]) for each in requests]
