"""The invariants of the design, one test each, seen at the engine: what callers and tensors show.

Their bookkeeping, page by page and without a model: unit/cache/test_prefix_cache_invariants.py.
"""

import itertools

import numpy as np
import pytest
from differential import InjectedError, LogitsRecorder, check_answer, failing_forward, poison
from matrix import matrix_rows
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from simulator import cached_paths, stored

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.inference.requests.options import RequestOptions

MODES = ("off", "memory_only", "restore")
BASE = random_tokens(120)
FAMILY = [
    BASE[:100],
    [*BASE[:70], *random_tokens(20, seed=1)],
    [*BASE[:33], *random_tokens(40, seed=2)],
    BASE,
]
MODEL = tiny_model()


def run_family(engine, prompts=FAMILY, after_step=lambda: None):
    """Adds a request at every other step, so that they run side by side; returns them answered."""
    requests = []
    for step in itertools.count():
        if step % 2 == 0 and len(requests) < len(prompts):
            requests.append(engine.add_request(prompts[len(requests)], greedy(5)))
        engine.step()
        after_step()
        if len(requests) == len(prompts) and not engine.has_work:
            return requests


# 1. Output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "order"),
    matrix_rows(
        itertools.product((9, 33, 512), ((0, 1, 2, 3), (3, 1, 0, 2))),
        (9, (3, 1, 0, 2)),
        (512, (0, 1, 2, 3)),
    ),
)
def test_invariant_1_outputs_equal_a_run_without_cache(max_tokens, order):
    """In every mode, cut and order; layer kinds one by one and mixed: random runs."""
    for mode in MODES:
        engine = tiny_engine(prefix_caching=mode, max_tokens=max_tokens)
        recorder = LogitsRecorder(engine)
        requests = run_family(engine, [FAMILY[i] for i in order])
        recorder.check(MODEL)
        for request in requests:
            check_answer(MODEL, request)


# 2. Hits -----------------------------------------------------------------------------------------


def test_invariant_2_a_hit_is_token_exact_and_within_one_salt():
    engine = tiny_engine()
    engine.generate([BASE], greedy(1), RequestOptions(salt="tenant"))
    for position in (0, 1, 15, 16, 17, 64, 119):
        other = [*BASE]
        other[position] = (other[position] + 1) % 97
        tokens = np.asarray(other, dtype=np.int32)
        assert engine.cache.match(tokens, "tenant").shared_tokens == position
        assert engine.cache.match(tokens, "").shared_tokens == 0
        assert engine.cache.match(tokens, "Tenant").shared_tokens == 0
    assert engine.cache.match(np.asarray(BASE, dtype=np.int32), "tenant").skipped_tokens == 120


# 4 and 5. What is visible ------------------------------------------------------------------------


def visible_bytes(engine) -> dict[tuple, bytes]:
    """Every KV row and every checkpoint that another request could use now, by (what it is, where
    it lies, the tokens that it stands for)."""
    memory, block = engine.memory, engine.config.block_size_tokens
    windowed = {n: memory.table_of_layer[n][0] is not None for n in memory.table_of_layer}
    seen = {}

    def rows(tokens, first_block, pages, start, end, layers):
        for position in range(start, end):
            row = pages[position // block - first_block]
            for number in layers:
                page = int(row[memory.table_of_layer[number][1]])
                for name, view in zip("kv", memory.kv_pages(number)):
                    key = name, number, page, position, tokens[: position + 1]
                    seen[key] = view[page, position % block].numpy().tobytes()

    full = [number for number, is_windowed in windowed.items() if not is_windowed]
    local = [number for number, is_windowed in windowed.items() if is_windowed]
    for _, tokens, edge in cached_paths(engine.cache):
        rows(tokens, edge.first_block, edge.pages(block), edge.start, edge.held_end, full)
        for checkpoint in stored(edge):
            position = checkpoint.position
            key = "state", tuple(checkpoint.pages.tolist()), tokens[:position]
            seen[key] = memory.pool[checkpoint.pages].numpy().tobytes()
            for group, pages in zip(engine.cache.spec.local_groups, checkpoint.local_pages):
                window = engine.cache.spec.groups[group].window
                first = engine.cache.spec.first_local_block(group, position)
                rows(tokens, first, pages, max(0, position - window), position, local)
    return seen


@pytest.mark.parametrize(
    ("pattern", "mode"),
    [("MG*-W-", "restore"), ("MG*-W-", "memory_only"), ("**", "restore"), ("MW", "restore")],
)
def test_invariant_4_nothing_visible_is_written_again(pattern, mode):
    model = tiny_model(pattern)
    engine = tiny_engine(model, prefix_caching=mode, max_tokens=24, block_size_tokens=32)
    known: dict[tuple, bytes] = {}
    num_compared = 0

    def check():
        nonlocal num_compared
        now = visible_bytes(engine)
        for key in known.keys() & now.keys():
            assert now[key] == known[key], f"{key[:-1]} was written after it became visible"
            num_compared += 1
        known.update(now)

    engine.generate([BASE[:50]], greedy(3), RequestOptions(n=3))
    run_family(engine, after_step=check)
    assert num_compared > 1000
    assert engine.stats()["checkpoints_evicted"] == engine.stats()["kv_blocks_evicted"] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_invariant_5_a_checkpoint_is_visible_after_its_forward_and_not_before(fails):
    engine = tiny_engine(max_tokens=24)
    forward = engine.runner.forward
    num_new = []

    def watched(plan):
        before = visible_bytes(engine).keys()
        logits = forward(plan)
        assert visible_bytes(engine).keys() == before
        num_new.append(sum(len(work.saves) for work in plan.work))
        return logits

    engine.runner.forward = watched
    if fails:
        engine.add_request(BASE, greedy(3), RequestOptions(cache_breakpoints=[10, 30]))
        engine.step()
        assert engine.stats()["checkpoints"] == 1
        with failing_forward(engine), pytest.raises(InjectedError):
            engine.step()
        assert num_new[-1] == 1
        assert engine.stats()["checkpoints"] == 1
        poison(engine)
    run_family(engine)
    assert sum(num_new) >= 8
    # What was saved is right: every prompt resumes from it and gives the same answer.
    for prompt in FAMILY:
        result = engine.generate([prompt], greedy(5))[0]
        assert result.prefix.skipped_tokens == len(prompt)
        assert is_greedy(MODEL, prompt, result.token_ids)


# 6. Slots and pages of others --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "mode"),
    matrix_rows(
        itertools.product(("MG*-W-", "*-*-", "MG", "W-W-"), MODES),
        *(("MG*-W-", mode) for mode in MODES),
        ("*-*-", "restore"),
    ),
)
def test_invariant_6_nothing_leaks_from_one_request_to_the_next(pattern, mode):
    """All memory that holds nothing is NaN before it is used again, the null page too."""
    model = tiny_model(pattern)
    engine = tiny_engine(model, prefix_caching=mode, max_tokens=50, max_requests=3)
    poison(engine)
    recorder = LogitsRecorder(engine)
    for seed in range(3):
        prompts = [*FAMILY[seed:], random_tokens(30, seed=seed)]
        requests = run_family(engine, prompts, after_step=lambda: poison(engine))
        recorder.check(model)
        for request in requests:
            check_answer(model, request)
        engine.cache.evict(20)
        poison(engine)


# 8. Optional work --------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["MG*-W-", "MMM", "W"])
def test_invariant_8_a_checkpoint_without_room_is_skipped_and_counted(pattern):
    model = tiny_model(pattern, mamba_state_dim=64)
    spec = tiny_engine(model).cache.spec
    # Room for the KV of the largest request, and not for a state beside it.
    pages = spec.num_blocks(125) * sum(spec.pages_per_block) + 1 + spec.checkpoint_pages // 2
    engine = tiny_engine(
        model, cache_bytes=pages * spec.page_bytes, max_tokens=30, max_sequence_length=125
    )
    skipped = 0
    for request in run_family(engine, after_step=engine.check_integrity):
        check_answer(model, request)
        skipped += request.prefix.checkpoints_skipped
    assert engine.stats()["checkpoints_no_room"] == skipped > 0


# 9. Reports --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "mode"),
    [*(("MG*-W-", mode) for mode in MODES), ("*-*-", "restore"), ("W", "restore")],
)
def test_invariant_9_reports_add_up_and_a_miss_has_one_reason(pattern, mode):
    model = tiny_model(pattern)
    engine = tiny_engine(model, prefix_caching=mode)
    computed = 0
    prompts = [*FAMILY, *FAMILY, random_tokens(50, seed=9)]
    for prompt in prompts:
        report = engine.generate([prompt], greedy(0))[0].prefix
        assert report.prompt_tokens == len(prompt)
        assert report.skipped_tokens + report.computed_tokens == len(prompt)
        assert 0 <= report.skipped_tokens <= report.shared_tokens <= len(prompt)
        computed += report.computed_tokens
        # No token was generated, so what the forwards ran is what the reports say.
        assert engine.stats()["forward_tokens"] == computed
        if report.skipped_tokens == len(prompt):
            assert report.miss_reason is None
        elif report.skipped_tokens < report.shared_tokens or report.shared_tokens == 0:
            assert isinstance(report.miss_reason, MissReason)
    stats = engine.stats()
    assert stats["prompt_tokens"] - stats["skipped_tokens"] == computed
    assert stats["hit_rate"] == stats["skipped_tokens"] / stats["prompt_tokens"]
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages"]
    assert stats["pages_in_use"] == stats["leases"] == 0 < stats["peak_pages_in_use"]
    assert stats["pool_bytes"] == (stats["pages"] + 1) * stats["page_bytes"]
    if mode != "restore":
        assert computed == sum(map(len, prompts))
    else:
        assert stats["skipped_tokens"] >= sum(map(len, FAMILY))
