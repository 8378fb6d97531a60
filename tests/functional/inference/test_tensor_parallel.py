"""Two ranks on gloo answer as one process does, in every mode, and decide alike."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rank_processes import join_ranks, run_ranks
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.cache.pages.spec import common_spec
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.distributed.ranks import ranks_of
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.memory.cache_memory import agree_on_spec, cache_spec_of, full_bytes
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.models.mixers.base import KVShape, LayerCache, StateTensor

RANKS = 2
TWO_GROUPS = dict(mamba_num_groups=2, linear_num_key_heads=2, linear_num_value_heads=4)
BASE = random_tokens(150)
PROMPTS = [
    BASE,
    BASE,
    BASE[:100] + random_tokens(20, seed=1),
    BASE[:100] + random_tokens(20, seed=2),
    BASE[:100] + random_tokens(20, seed=3),
]


def answers(model, mode: str):
    """Tokens, log-probs and skipped tokens of prompts that come one by one and then together."""
    engine = DynamicInferenceEngine(
        model,
        None,
        InferenceConfig(
            prefix_caching=mode,
            cache_bytes=1 << 20,
            max_requests=4,
            max_tokens=64,
            max_sequence_length=256,
            verify_ranks=True,
        ),
    )
    params = greedy(6, return_log_probs=True, skip_prompt_log_probs=True)
    results = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    results += engine.generate(PROMPTS, params, RequestOptions(salt="together"))
    engine.check_integrity()
    return [(r.generated_tokens, r.log_probs, r.prefix.skipped_tokens) for r in results]


def crowded_answers(model):
    """Sampled answers and the digests of every step, in a pool too small for all of them."""
    config = InferenceConfig(
        cache_bytes=40 << 10, max_requests=4, max_tokens=64, max_sequence_length=80
    )
    engine = DynamicInferenceEngine(model, None, config)
    params = SamplingParams(num_tokens_to_generate=40, seed=7, temperature=0.8, top_p=0.9)
    requests = [engine.add_request(BASE[start : start + 30], params) for start in (0, 40, 80)]
    digests = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        digests.append(engine.cache.digest())
    assert engine.stats()["preemptions"] > 0
    return [request.generated_tokens for request in requests], digests


def tiered_answers(model, folder: str):
    """Answers and fetched tokens with host memory and disk below the pool, and a warm start."""
    config = InferenceConfig(
        cache_bytes=1 << 20,
        max_requests=4,
        max_sequence_length=256,
        host_cache_bytes=30_000,
        cache_dir=f"{folder}/cache",
        verify_ranks=True,
    )
    rows = []
    for _ in range(2):
        engine = DynamicInferenceEngine(model, None, config)
        for prompt in PROMPTS:
            result = engine.generate([prompt], greedy(6))[0]
            rows.append((result.generated_tokens, result.prefix.fetched_tokens))
            engine.cache.evict(10**6)
        for result in engine.generate(PROMPTS, greedy(6)):  # side by side
            rows.append((result.generated_tokens, result.prefix.fetched_tokens))
        engine.cache.evict(10**6)
        engine.save_cache()
        engine.close()
    return rows


def different_tokens_error(model, token: int) -> str:
    """What verify_ranks says when the ranks compute different tokens after equal calls."""
    config = InferenceConfig(cache_bytes=1 << 20, max_requests=2, verify_ranks=True)
    engine = DynamicInferenceEngine(model, None, config)
    engine.add_request(BASE[:20], greedy(5)).tokens[7] = token
    try:
        engine.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def pages_of_uneven_ranks(model, rank: int) -> int:
    """Pages that the ranks settle on when they have different room."""
    config = InferenceConfig(cache_bytes=(1 + rank) << 20, max_requests=2)
    return DynamicInferenceEngine(model, None, config).stats()["pages"]


def declared(rank: int):
    """Arguments of `agree_on_spec` on a pipeline's first or second stage."""
    kv, state = KVShape(num_heads=2, head_dim=8), StateTensor("ssm", (64, 8), torch.float32)
    layers = [
        [LayerCache(kv=kv)] * 3 + [LayerCache(states=(state,))],
        [LayerCache(kv=kv), LayerCache(kv=replace(kv, window=20))]
        + [LayerCache(states=(state,))] * 2,
    ][rank]
    spec = cache_spec_of(layers, 32, torch.float32, 16)
    return spec, full_bytes(layers, spec, torch.float32), (4000.0, 2000.0)[rank], (30.0, 10.0)[rank]


def run_rank(rank: int, folder: str) -> None:
    join_ranks(rank, RANKS, f"{folder}/rendezvous")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    model, _ = load_pretrained(folder, tensor_model_parallel_size=RANKS)
    given = {mode: answers(model, mode) for mode in PREFIX_CACHING_MODES}
    given["tiers"] = tiered_answers(model, folder)
    given["crowded"] = crowded_answers(model)
    given["spec"] = repr(
        agree_on_spec(*declared(rank), ranks_of(model.pg_collection), stage=rank)
    )  # the file holds no classes
    given["pages"] = pages_of_uneven_ranks(model, rank)
    given["different tokens"] = different_tokens_error(model, rank)
    given["the same"] = different_tokens_error(model, 1)
    torch.save(given, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    save_checkpoint(tiny_model(**TWO_GROUPS), folder)
    run_ranks(run_rank, (str(folder),), RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("mode", PREFIX_CACHING_MODES)
def test_two_ranks_answer_as_one(by_rank, mode):
    model = tiny_model(**TWO_GROUPS)
    assert by_rank[0][mode] == by_rank[1][mode]
    alone = answers(model, mode)
    for given, expected, prompt in zip(by_rank[0][mode], alone, PROMPTS + PROMPTS):
        assert given[0] == expected[0]
        assert is_greedy(model, prompt, given[0])
        torch.testing.assert_close(
            torch.tensor(given[1]), torch.tensor(expected[1]), atol=1e-5, rtol=0
        )
    if mode == "restore":
        for rows in (alone, by_rank[0][mode]):
            skipped = [row[2] for row in rows]
            assert skipped[:2] == [0, 150] and skipped[3:5] == [100, 100]
            assert 64 <= skipped[2] < 100
            assert min(skipped[6:]) >= 64
    else:
        assert not any(row[2] for row in by_rank[0][mode])


def test_ranks_fetch_alike(by_rank):
    assert by_rank[0]["tiers"] == by_rank[1]["tiers"]
    tokens, fetched = zip(*by_rank[0]["tiers"])
    model = tiny_model(**TWO_GROUPS)
    assert all(is_greedy(model, prompt, each) for prompt, each in zip(PROMPTS, tokens))
    assert all(tokens[start : start + 5] == tokens[:5] for start in (5, 10, 15))
    assert fetched[0] == 0 and fetched[1] == 150 and fetched[10:15] == (150, 150, 120, 120, 120)
    assert all(fetched[5:10]) and fetched[15:] == (150, 150, 120, 120, 120)  # side by side


def test_ranks_decide_and_draw_alike_under_preemption(by_rank):
    assert by_rank[0]["crowded"] == by_rank[1]["crowded"]
    tokens, _ = by_rank[0]["crowded"]
    config = InferenceConfig(cache_bytes=1 << 20, max_requests=4, max_sequence_length=80)
    engine = DynamicInferenceEngine(tiny_model(**TWO_GROUPS), None, config)
    params = SamplingParams(num_tokens_to_generate=40, seed=7, temperature=0.8, top_p=0.9)
    alone = engine.generate([BASE[start : start + 30] for start in (0, 40, 80)], params)
    assert tokens == [result.generated_tokens for result in alone]


def test_ranks_with_uneven_room_take_what_the_smaller_one_has(by_rank):
    page_bytes = tiny_engine(tiny_model(**TWO_GROUPS)).cache.spec.page_bytes // RANKS
    assert by_rank[0]["pages"] == by_rank[1]["pages"] == (1 << 20) // page_bytes - 1


def test_ranks_that_compute_different_tokens_are_told(by_rank):
    for rank in by_rank:
        assert "decided differently or compute different tokens" in rank["different tokens"]
        assert rank["the same"] == "nothing"


def test_invariant_7_stages_agree_on_one_spec(by_rank):
    specs = [declared(rank)[0] for rank in range(RANKS)]
    # Three states of 64 x 8, a hidden state of 32; four full-attention layers of 2 heads of 8.
    model_bytes = 3 * 64 * 8 * 4 + 32 * 4, 4 * 2 * (8 + 8) * 4
    agreed = common_spec(specs, 6000 / 40, model_bytes)
    assert agreed not in specs
    assert by_rank[0]["spec"] == by_rank[1]["spec"] == repr(agreed)
