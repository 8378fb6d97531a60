"""One engine over several ranks on gloo: the first rank leads, the others follow. Its answers,
log-probabilities and skipped tokens are those of one rank, in every layout."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch.distributed as dist
from matrix import asked, matrix_rows
from rank_processes import on_ranks
from reference import fresh_model, greedy, is_greedy, random_tokens, tiny_model
from small_models import fill_adapters
from split_models import assert_same_answers, load

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.inference import engine_parts
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.memory import budget
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.training.lora import LoraFields, add_adapters, save_adapters

MODEL = dict(
    layer_pattern="MG*S|E*W-",
    mamba_num_groups=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    sliding_window=20,
)
LAYOUTS = {
    "TP 2": dict(tensor_model_parallel_size=2),
    "TP 4": dict(tensor_model_parallel_size=4),
    "EP 2": dict(expert_model_parallel_size=2),
    "PP 2": dict(pipeline_model_parallel_size=2),
    "TP 2 x PP 2": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
}
BASE = random_tokens(150)
PROMPTS = [
    BASE,
    BASE,
    BASE[:100] + random_tokens(20, seed=1),
    BASE[:100] + random_tokens(20, seed=2),
    BASE[:100] + random_tokens(20, seed=3),
]
LOGGED = greedy(4, return_log_probs=True, skip_prompt_log_probs=True)
CHUNKS = {"chunked": 64, "whole": 1024}
CASES = [(mode, cut) for mode in PREFIX_CACHING_MODES for cut in CHUNKS]


def rows(results):
    return [(r.token_ids, r.log_probs, r.prefix.skipped_tokens) for r in results]


def answers(engine):
    """Prompts that come one by one, and then together."""
    results = [engine.generate([prompt], LOGGED)[0] for prompt in PROMPTS]
    results += engine.generate(PROMPTS, LOGGED, RequestOptions(salt="together"))
    return rows(results)


def sampled_in_a_crowd(engine):
    """Sampled answers in a pool that is too small for all of them."""
    params = SamplingParams(
        num_tokens_to_generate=40,
        seed=7,
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
    )
    results = engine.generate(
        [BASE[start : start + 30] for start in (0, 40, 80)], params, RequestOptions(n=2)
    )
    return [sample.token_ids for result in results for sample in result.samples]


def drafted(engine):
    """The same twice: the second time by drafts of the first; then answers with log-probs."""
    found = [sampled_in_a_crowd(engine) for _ in range(2)]
    logged = engine.generate([BASE[:70]] * 2, LOGGED)
    return *found, [(result.token_ids, result.log_probs) for result in logged]


def from_tiers(engine):
    """Answers when nothing is left in the pool, which all ranks empty. Host memory holds a part of
    the prompts and the disk the others."""
    found = rows(engine.generate([prompt], LOGGED)[0] for prompt in PROMPTS)
    engine.cache.evict(10**6)
    found += rows(engine.generate(PROMPTS, LOGGED))
    engine.save_cache()
    return found


def under_pressure(engine):
    """Answers and fetches with a pool that is too small for two prompts."""
    results = [engine.generate([prompt], greedy(6))[0] for prompt in PROMPTS]
    results += engine.generate(PROMPTS, greedy(6))
    return [result.token_ids for result in results]


def cancelled(engine):
    """An answer beside one that is cancelled, and one that nobody waits for."""
    kept = engine.add_request(BASE[:40], greedy(8))
    gone = engine.add_request(BASE[50:90], greedy(8))
    stream = engine.stream(BASE[90:120], greedy(8))
    next(stream)
    engine.cancel(gone)
    del stream
    while not kept.closed:
        engine.step()
    return kept.token_ids


def by_adapters(engine):
    """Answers of an adapter, of the model alone, and of the adapter again when it has come anew."""
    folder = Path(engine.config.cache_dir).parent / "adapter"
    options = [RequestOptions(adapter=name) for name in ("own", None)]
    found = []
    for _ in range(2):
        engine.adapters.load("own", folder)
        found += rows(engine.generate([BASE[:90]] * 2, LOGGED, options))
        engine.adapters.unload("own")
    return found


def make_config(mode="restore", cut="whole", **fields):
    settings = dict(cache_bytes=1 << 20, max_requests=8, max_sequence_length=256, verify_ranks=True)
    settings |= dict(prefix_caching=mode, max_tokens=CHUNKS[cut])
    return InferenceConfig(**{**settings, **fields})


def jobs(folder, page_bytes, cases):
    """Name -> (settings of an engine, its work). Small pools have as many pages in any layout."""
    found = {f"{mode}, {cut}": (make_config(mode, cut), answers) for mode, cut in cases}
    crowd = make_config(cache_bytes=40 * page_bytes, max_tokens=64, max_sequence_length=80)
    found["crowd"] = crowd, sampled_in_a_crowd
    found["drafted"] = replace(crowd, speculation="lookup", warm_up=False), drafted
    tiers = make_config(host_cache_bytes=60 * page_bytes, cache_dir=folder)
    found["tiers"] = tiers, from_tiers
    found["warm start"] = tiers, from_tiers
    small = replace(tiers, cache_bytes=50 * page_bytes, cache_dir=f"{folder}.small", max_tokens=64)
    found["pressure"] = small, under_pressure
    found["cancelled"] = make_config(), cancelled
    adapters = make_config(max_adapters=1, max_adapter_rank=12, cache_dir=f"{folder}.own")
    found["adapters"] = adapters, by_adapters
    return found


def sizes(model, rank):
    """Pages that ranks with less memory than the rank before them decide on; and what they are told
    where the last one lacks it."""
    available = budget.available_bytes
    config = make_config(cache_bytes=None)
    budget.available_bytes = lambda device: (4096 - 512 * rank) << 20
    pages = DynamicInferenceEngine(model, None, config).cache.allocator.num_pages
    budget.available_bytes = lambda device: (100 if rank else 4096) << 20
    try:
        DynamicInferenceEngine(model, None, replace(config, cache_bytes=64 << 20))
    except MemoryError as error:
        return pages, str(error)
    finally:
        budget.available_bytes = available


def page_bytes_of(model):
    return DynamicInferenceEngine(model, None, make_config()).cache.spec.page_bytes


def run_all(name, folder, cases):
    rank, model = dist.get_rank(), load(folder, **LAYOUTS[name])
    given = {"sizes": sizes(model, rank), "page_bytes": page_bytes_of(model)}
    own = jobs(f"{folder}/{name}.cache", page_bytes_of(model), cases)
    for job, (settings, work) in own.items():
        engine_parts.WARMED = {"cpu"} if work is cancelled else set()
        with DynamicInferenceEngine(model, None, settings) as engine:
            assert (engine.warm_up_seconds > 0) == (work is cancelled)
            if work is from_tiers:  # all ranks make the same calls
                given[job] = work(engine)
            elif rank == 0:
                with engine.lead():
                    given[job] = work(engine)
            else:
                engine.follow()
            engine.check_integrity()
            counts = engine.stats()
            given[f"{job}: counts"] = {
                key: counts[key]
                for key in (
                    *("preemptions", "fetches", "skipped_tokens", "disk_states", "leases"),
                    *("draft_tokens", "draft_tokens_accepted"),
                )
            }
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("over_ranks")
    save_checkpoint(tiny_model(**MODEL), folder)
    model = fresh_model(**MODEL)
    add_adapters(model, LoraFields(rank=3))
    fill_adapters(model)
    save_adapters(model, folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def cases(request):
    """Those of `CASES` that this session asks for."""
    names = asked(request, "case", [f"{mode}, {cut}" for mode, cut in CASES])
    return [tuple(name.split(", ")) for name in names]


@pytest.fixture(scope="module")
def alone(folder, cases):
    """The work of one rank, by job."""
    model = tiny_model(**MODEL)
    given = {}
    own = jobs(f"{folder}/alone.cache", page_bytes_of(model), cases)
    for job, (settings, work) in own.items():
        with DynamicInferenceEngine(model, None, settings) as engine:
            given[job] = work(engine)
    return given


@pytest.fixture(scope="module", params=matrix_rows(LAYOUTS, "PP 2"))
def by_rank(request, folder, cases):
    size, results = prod(LAYOUTS[request.param].values()), folder / f"{request.param}.results"
    results.mkdir()
    return on_ranks(run_all, size, results, request.param, str(folder), cases)


def test_ranks_with_different_memory_decide_alike(by_rank):
    """The pool is that of the rank with the least, which all name where it lacks memory."""
    found = [rank["sizes"] for rank in by_rank]
    assert all(each == found[0] for each in found)
    pages, message = found[0]
    available, size = (4096 - 512 * (len(by_rank) - 1)) << 20, len(by_rank)
    assert 0.2 * available < pages * by_rank[0]["page_bytes"] * size < 0.25 * available
    share = (100 << 20) // size
    assert re.match(
        rf"cpu has {share} bytes .* for rank 1 on \S+, and the engine asks for \d+ ", message
    )


@pytest.mark.parametrize(
    "case",
    matrix_rows(
        [f"{mode}, {cut}" for mode, cut in CASES], "restore, chunked", "memory_only, whole"
    ),
)
def test_ranks_answer_and_skip_as_one(by_rank, alone, case):
    given = by_rank[0][case]
    assert_same_answers(given, alone[case])
    model = tiny_model(**MODEL)
    assert all(is_greedy(model, prompt, own[0]) for prompt, own in zip(PROMPTS, given))


def test_ranks_answer_by_adapters_as_one(by_rank, alone):
    given = by_rank[0]["adapters"]
    assert_same_answers(given, alone["adapters"])
    assert given[0][1] != pytest.approx(given[1][1], abs=1e-2)
    assert [skipped > 80 for *_, skipped in given] == [False, False, True, True]


def test_ranks_draw_as_one_under_preemption(by_rank, alone):
    assert by_rank[0]["crowd"] == alone["crowd"]
    assert by_rank[0]["crowd: counts"]["preemptions"] > 0


def test_ranks_draft_as_one_and_as_without_drafts(by_rank, alone):
    first, second, logged = by_rank[0]["drafted"]
    assert first == second == alone["crowd"]
    for own, their in zip(logged, alone["drafted"][2], strict=True):
        assert own[0] == their[0]
        assert own[1] == pytest.approx(their[1], abs=1e-5)
    assert by_rank[0]["drafted: counts"]["draft_tokens_accepted"] > 20


@pytest.mark.parametrize("job", ["tiers", "warm start"])
def test_ranks_fetch_as_one(by_rank, alone, job):
    assert_same_answers(by_rank[0][job], alone[job])
    assert by_rank[0][f"{job}: counts"]["fetches"] > 0


def test_ranks_answer_as_one_while_tiers_fill(by_rank, alone):
    assert by_rank[0]["pressure"] == alone["pressure"]
    assert by_rank[0]["pressure: counts"]["fetches"] > 0


def test_a_cancelled_request_ends_on_all_ranks(by_rank, alone):
    assert by_rank[0]["cancelled"] == alone["cancelled"]
    assert all(rank["cancelled: counts"]["leases"] == 0 for rank in by_rank)


def test_following_ranks_count_as_the_first_one(by_rank):
    counts = [{k: v for k, v in rank.items() if k.endswith("counts")} for rank in by_rank]
    assert all(each == counts[0] for each in counts)
