"""What only a CUDA device can show; `pytest -m gpu`."""

from collections import Counter

import differential
import numpy as np
import pytest
import torch
from backends_alone import let_backends_serve_alone
from differential import PATTERNS, RandomRun
from door import answer, door_engine, greedy_params
from reference import ALL_MIXERS, full_logits, greedy, is_greedy, random_tokens, tiny_model
from state_dicts import load_state

from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.inference import engine_parts
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.memory.budget import available_bytes
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker.sampler import HostCopy
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.offload.page_mover import PageMover

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    """Tests compile what they launch, and no more."""
    monkeypatch.setattr(engine_parts, "WARMED", set())


def on_gpu(layer_spec: str, dtype: torch.dtype, pattern: str = ALL_MIXERS):
    """The tiny model's weights in a model on the GPU, in chunks that the kernels take."""
    source = tiny_model(pattern)
    config = HybridConfig.from_dict(
        source.config.to_dict(),
        layer_spec=layer_spec,
        params_dtype=dtype,
        linear_chunk_size=32,
    )
    with torch.device(DEVICE):
        model = build_hybrid_model(config).eval()
    load_state(model, full_state_dict(source), cast=True)
    return model


def gpu_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens], device=DEVICE))[0].float().cpu()


@pytest.mark.parametrize("layer_spec", ["local", "transformer_engine"])
def test_logits_equal_those_of_the_cpu(layer_spec):
    if layer_spec != "local":
        pytest.importorskip(layer_spec)
    tokens = random_tokens(200)
    given = gpu_logits(on_gpu(layer_spec, torch.float32), tokens)
    torch.testing.assert_close(given, full_logits(tiny_model(), tokens), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("symbol", "MG*W-ESCH+KL")
def test_each_kind_of_layer_in_bf16_is_near_fp32_on_the_cpu(monkeypatch, symbol):
    """In standard deviations of the logits; 0.12 at most on a CPU. All experts see each token."""
    let_backends_serve_alone(monkeypatch)
    tokens = random_tokens(200)
    expected = full_logits(tiny_model(symbol + "-"), tokens)
    given = gpu_logits(on_gpu("local", torch.bfloat16, symbol + "-"), tokens)
    assert (given - expected).abs().max() <= 0.25 * expected.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["off", "memory_only", "restore"])
def test_answers_equal_a_forward_pass_without_cache(mode, dtype):
    model = on_gpu("local", dtype)
    engine = DynamicInferenceEngine(
        model, None, InferenceConfig(prefix_caching=mode, cache_bytes=8 << 20, max_tokens=64)
    )
    base = random_tokens(150)
    prompts = [base, base, base[:100] + random_tokens(9, seed=1), base[:100] + random_tokens(9)]
    params = greedy(8, return_log_probs=True, skip_prompt_log_probs=True)
    for prompt in prompts:
        result = engine.generate([prompt], params)[0]
        logits_TV = gpu_logits(model, prompt + result.token_ids)
        rows = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        tolerance = 1e-3 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=tolerance, rtol=0)
        engine.check_integrity()


@pytest.mark.parametrize("encoding", ["exact", "int8"])
def test_a_step_waits_for_the_device_once(monkeypatch, encoding):
    """torch says so itself, of layers that backends serve alone."""
    let_backends_serve_alone(monkeypatch)
    model = on_gpu("local", torch.bfloat16, "M*SGKE-W-")
    config = InferenceConfig(cache_bytes=8 << 20, max_tokens=64, state_encoding=encoding)
    engine = DynamicInferenceEngine(model, None, config)
    prompts = [random_tokens(150), [*random_tokens(150)[:100], 1, 2], random_tokens(9, seed=1)]
    params = [
        SamplingParams(top_k=1, num_tokens_to_generate=4),
        SamplingParams(top_p=0.9, num_tokens_to_generate=4, return_log_probs=True),
        SamplingParams(num_tokens_to_generate=4),
    ]
    expected = engine.generate(prompts, params)  # kernels are compiled, tables are made
    launch, wait, num_waits = engine.runner.launch, HostCopy.wait, 0

    def checked(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def counted(copy):
        nonlocal num_waits
        num_waits += 1
        return wait(copy)

    monkeypatch.setattr(engine.runner, "launch", checked)
    monkeypatch.setattr(HostCopy, "wait", counted)
    again = engine.generate(prompts, params)
    assert 0 < num_waits <= engine.num_steps
    assert [len(r.token_ids) for r in again] == [len(r.token_ids) for r in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["M*SGCKW-", "+-", "*E"])
def test_cuda_graphs_change_no_bit(pattern, dtype):
    """Of log-probabilities: of requests that come and end at different steps, so that graphs of
    all sizes are filled up; again after a suspension. In fp32 experts cannot be captured."""
    model = on_gpu("local", dtype, pattern)
    prompts = [random_tokens(20 + 29 * seed, seed=seed) for seed in range(11)]
    answers = []
    for on in (False, True):
        config = InferenceConfig(cache_bytes=32 << 20, max_requests=16, cuda_graphs=on)
        with DynamicInferenceEngine(model, None, config) as engine:
            for _ in range(2):
                params = [
                    SamplingParams(top_k=1, num_tokens_to_generate=5 + seed, return_log_probs=True)
                    for seed in range(len(prompts))
                ]
                results = engine.generate(prompts, params)
                answers.append([(r.token_ids, r.log_probs) for r in results])
                engine.check_integrity()
                stats = engine.stats()
                engine.suspend()
                engine.resume()
    can_be_captured = pattern != "*E" or dtype == torch.bfloat16
    assert (stats["graphs"] >= 4 and stats["graph_bytes"] > 0) is can_be_captured
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("pattern", ["M*S-", "GCKW-", "+-", "*E"])
def test_no_request_waits_for_the_compiler_after_a_warm_up(pattern, monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(engine_parts, "WARMED", {DEVICE})
    model, compiled = on_gpu("local", torch.bfloat16, pattern), []
    config = InferenceConfig(cache_bytes=32 << 20, max_requests=6, max_tokens=256, cuda_graphs=True)
    with DynamicInferenceEngine(model, None, config) as engine:
        stats = engine.stats()
        assert stats["warm_up_ms"] > 0 and stats["graphs"] > 0 and stats["steps"] == 0
        assert not engine.memory.pool.any() and not engine.memory.slots.any()
        monkeypatch.setattr(
            knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr)
        )
        params = SamplingParams(num_tokens_to_generate=6)
        prompts = [random_tokens(n, seed=n) for n in (1, 16, 17, 90, 255, 600)]
        for prompt in prompts:
            engine.generate([prompt], params)
            engine.generate(
                [prompt + prompt], params, RequestOptions(cache_breakpoints=[len(prompt)])
            )
        engine.generate(prompts + prompts, params)
        assert compiled == [] and engine.stats()["graphs"] == stats["graphs"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_left_the_pool_comes_back_to_the_bit(tmp_path, tier):
    model = on_gpu("local", torch.bfloat16)
    below = {"host_cache_bytes": 64 << 20} if tier == "host" else {"cache_dir": tmp_path}
    config = InferenceConfig(cache_bytes=8 << 20, max_tokens=64, **below)
    engine = DynamicInferenceEngine(model, None, config)
    prompts = [random_tokens(150 + 7 * seed, seed=seed) for seed in range(4)]
    params = greedy(8, return_log_probs=True, skip_prompt_log_probs=True)
    first = [engine.generate([prompt], params)[0] for prompt in prompts]
    warm = [engine.generate([prompt], params)[0] for prompt in prompts]  # from the pool
    engine.cache.evict(10**6)
    engine.memory.pool.fill_(0xFF)
    again = engine.generate(prompts, params)
    for prompt, before, pool, after in zip(prompts, first, warm, again):
        assert after.prefix.skipped_tokens == after.prefix.fetched_tokens == len(prompt)
        assert after.token_ids == before.token_ids
        assert after.log_probs[0] == pool.log_probs[0]  # from the same saved hidden state
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_runs_with_tiers(monkeypatch, pattern):
    """Requests that share, fork and preempt each other while pages are copied to pinned memory and
    back on a stream of their own; free memory is filled with NaN behind each step."""
    monkeypatch.setattr(differential, "TOLERANCE", 1e-3)
    totals = Counter()
    for seed in range(3):
        run = RandomRun(seed, patterns=(pattern,), tiers=True, device=DEVICE)
        run.run()
        totals.update(run.stats)
    assert totals["skipped_tokens"] > 0


def test_a_prompt_is_fetched_while_others_decode():
    """Its pages arrive on another stream than the steps that write theirs."""
    model = on_gpu("local", torch.float32)
    config = InferenceConfig(cache_bytes=8 << 20, max_tokens=64, host_cache_bytes=64 << 20)
    engine = DynamicInferenceEngine(model, None, config)
    params = SamplingParams(top_k=1, num_tokens_to_generate=40)
    prompts = [random_tokens(150 + 7 * seed, seed=seed) for seed in range(4)]
    known = [engine.generate([prompt], params)[0] for prompt in prompts]
    engine.cache.evict(10**6)
    engine.memory.pool.fill_(0xFF)
    others = [engine.add_request(random_tokens(90, seed=9 + i), params) for i in range(3)]
    while not all(request.first_token_at for request in others):
        engine.step()
    again = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    for request, before in zip(again, known):
        assert request.result().prefix.fetched_tokens == request.num_prompt_tokens
        assert request.token_ids == before.token_ids
    for seed, request in enumerate(others, start=9):
        assert is_greedy(model, random_tokens(90, seed=seed), request.token_ids)
    engine.close()


def test_host_memory_of_a_tier_is_pinned():
    pool = torch.arange(64, dtype=torch.uint8, device=DEVICE).view(8, 8)
    mover = PageMover(pool)
    (out,) = mover.to_host([np.array([3, 5], np.int32)])
    assert out.data.is_pinned()
    assert out.numpy().tolist() == [list(range(24, 32)), list(range(40, 48))]
    arrival = mover.to_pool([np.array([0, 1], np.int32)], [out])
    arrival.wait()
    assert arrival.is_done()
    assert pool[:2].flatten().tolist() == [*range(24, 32), *range(40, 48)]


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_a_suspended_engine_gives_the_devices_memory_back(mode):
    engine = door_engine(
        on_gpu("local", torch.float32), kv_cache_management_mode=mode, buffer_size_gb=0.25
    )
    prompt = torch.tensor(random_tokens(150), device=DEVICE)
    first = answer(engine, prompt, greedy_params(4))
    held = torch.cuda.memory_allocated()
    engine.suspend()
    assert held - torch.cuda.memory_allocated() >= 0.24 * 2**30
    engine.resume()
    again = answer(engine, prompt, greedy_params(4))
    assert again.token_ids == first.token_ids
    assert (again.num_cached_tokens == len(prompt)) is (mode == "offload")


def test_a_pool_takes_its_part_of_what_the_device_has_left():
    """A small part, and wide bounds: other tests run beside this one on the same device."""
    model, prompt = on_gpu("local", torch.float32), random_tokens(150)
    params = SamplingParams(top_k=1, num_tokens_to_generate=8)
    left = available_bytes(torch.device(DEVICE))
    engine = DynamicInferenceEngine(model, None, InferenceConfig(memory_fraction=0.02))
    assert 0.01 * left <= engine.config.cache_bytes == engine.memory.pool.numel() <= 0.03 * left
    for _ in range(2):
        (result,) = engine.generate([prompt], params)
        assert is_greedy(tiny_model(), prompt, result.token_ids)
    assert result.prefix.skipped_tokens == len(prompt)
    engine.close()
