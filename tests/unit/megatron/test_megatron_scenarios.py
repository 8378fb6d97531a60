"""The scenarios of Megatron-LM's own tests of prefix caching, on our cache, through the door.

Written anew from what they are about; expectations are full forward passes without a cache.
"""

import numpy as np
import pytest
import torch
from door import BLOCK, MIB, answer, door_engine, finish, greedy_params
from reference import full_logits, is_greedy, random_tokens, tiny_model

PROMPT = random_tokens(96)
PAGE, SLOT = 4096, 24576  # bytes, of the tiny model


def small_pool(num_pages: int, max_requests: int = 4, **fields):
    """An engine whose pool has so many pages, the null page included."""
    return door_engine(
        **{
            "max_requests": max_requests,
            "buffer_size_gb": (max_requests * SLOT + num_pages * PAGE) / (1 << 30),
            "prefix_caching_mamba_gb": 1 / (1 << 30),
            "max_sequence_length": 256,
            "max_tokens": 64,
            **fields,
        }
    )


def handle(engine, request_id: int):
    """Our engine's record of an unfinished request."""
    return engine.requests[request_id].handle


def two_running_requests(**fields):
    """In the middle of answering one prompt twice: the second came one step later."""
    engine = door_engine(prefix_caching_mamba_gb=None, **fields)
    engine.add_request(1, PROMPT, greedy_params(8))
    engine.step_modern()
    engine.add_request(2, PROMPT, greedy_params(8))
    engine.step_modern()
    return engine


# Memory-only -------------------------------------------------------------------------------------


def test_memory_only_skips_no_token_and_computes_the_whole_chunk():
    engine = two_running_requests()
    assert engine.get_request(2).num_cached_tokens == 0
    assert handle(engine, 2).report.shared_tokens == len(PROMPT)
    assert engine.context.lifetime_prefill_token_count == 2 * len(PROMPT)
    assert engine.engine.context.ragged_layout().lengths == (1, len(PROMPT))


def test_memory_only_takes_no_extra_blocks_for_the_shared_part():
    engine = two_running_requests()
    first, second = (handle(engine, i).lease.block_table for i in (1, 2))
    count = len(PROMPT) // BLOCK
    assert (second[:count] == first[:count]).all()
    assert len(set(second.ravel()) - set(first.ravel())) == len(second) - count


def test_memory_only_shared_blocks_have_two_references():
    engine = two_running_requests()
    shared = handle(engine, 1).lease.block_table[: len(PROMPT) // BLOCK].ravel()
    assert (engine.engine.cache.allocator.ref_counts[shared] == 2).all()


def test_memory_only_computes_from_offset_zero_and_answers_right():
    engine = two_running_requests()
    context = engine.engine.context
    assert context.ragged_layout().start_positions[1] == 0  # decodes come first
    assert context.input_ids[0, 1 : 1 + len(PROMPT)].tolist() == PROMPT
    for request in finish(engine).values():
        assert is_greedy(tiny_model(), PROMPT, request.generated_tokens)
    engine.engine.check_integrity()


# Admission ---------------------------------------------------------------------------------------


def test_a_match_is_pinned_before_its_request_may_evict():
    """The pool is full of what others left, and the new request needs most of it: what it matched
    must not be what it evicts."""
    engine = small_pool(40)
    for _ in range(3):  # others use the prompt, too, so it stays
        answer(engine, PROMPT, greedy_params(4))
    for seed in range(1, 6):
        answer(engine, random_tokens(60, seed=seed), greedy_params(4))
        prompt = [*PROMPT, *random_tokens(50, seed=seed)]
        matched = engine.engine.explain(prompt).match.skipped_tokens
        evicted = engine.engine.cache.num_evicted
        again = answer(engine, prompt, greedy_params(20))
        assert engine.engine.cache.num_evicted > evicted
        assert again.num_cached_tokens == matched > 0
        assert is_greedy(tiny_model(), prompt, again.generated_tokens)
        engine.engine.check_integrity()


def test_a_failed_admission_rolls_back_and_counts_once():
    engine = small_pool(20)
    answer(engine, PROMPT, greedy_params(1))
    before = engine.engine.stats()
    engine.add_request(1, random_tokens(100, seed=1), greedy_params(60))
    engine.step_modern()
    engine.add_request(2, [*PROMPT, 1], greedy_params(60))
    waited = 0
    while handle(engine, 2).report is None:
        engine.step_modern()
        engine.engine.check_integrity()
        waited += 1
    assert waited > 5
    answers = finish(engine)
    after = engine.engine.stats()
    assert after["requests"] - before["requests"] == 2
    assert after["refused"] > before["refused"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == 100 + 97
    skipped = after["skipped_tokens"] - before["skipped_tokens"]
    assert skipped == sum(request.num_cached_tokens for request in answers.values())
    assert is_greedy(tiny_model(), [*PROMPT, 1], answers[2].generated_tokens)


def test_no_needless_deferral():
    """Requests with nothing in common, and those whose prefix is cached already, start together."""
    engine = door_engine()
    answer(engine, PROMPT, greedy_params(4))
    prompts = [[*PROMPT, 1], [*PROMPT, 2], random_tokens(40, seed=1), random_tokens(40, seed=2)]
    for request_id, prompt in enumerate(prompts):
        engine.add_request(request_id, prompt, greedy_params(4))
    assert sorted(engine.step_modern()["active_request_ids"]) == [0, 1, 2, 3]
    cached = [engine.get_request(request_id).num_cached_tokens for request_id in range(4)]
    assert cached == [96, 96, 0, 0]


def test_a_request_waits_for_a_prefill_that_will_save_its_prefix_and_computes_nothing_twice():
    engine = door_engine()
    for request_id in range(3):
        engine.add_request(request_id, [*PROMPT, request_id], greedy_params(4))
    answers = finish(engine)
    assert engine.context.lifetime_prefill_token_count == len(PROMPT) + 3
    assert [answers[i].num_cached_tokens for i in range(3)] == [0, 96, 96]


def test_without_a_free_slot_nothing_changes():
    engine = small_pool(200, max_requests=2)
    answer(engine, PROMPT, greedy_params(2))
    for request_id in (1, 2):
        engine.add_request(request_id, random_tokens(20, seed=request_id), greedy_params(40))
    engine.step_modern()
    shared = engine.engine.cache.allocator.num_evictable
    before = engine.engine.stats()
    engine.add_request(3, PROMPT, greedy_params(2))
    engine.step_modern()
    assert handle(engine, 3).lease is None
    after = engine.engine.stats()
    for counter in ("requests", "shared_tokens", "skipped_tokens", "leases"):
        assert after[counter] == before[counter]
    assert engine.engine.cache.allocator.num_evictable >= shared, "it pins nothing"
    answers = finish(engine)
    assert answers[3].num_cached_tokens == len(PROMPT)
    engine.engine.check_integrity()


def test_a_state_that_cannot_be_restored_leaves_no_half_admitted_request(monkeypatch):
    """The copy into the live slot fails once for lack of memory: the request gives back its slot
    and its pins, and computes its prompt."""
    engine = door_engine()
    answer(engine, PROMPT, greedy_params(2))
    engine.add_request(1, random_tokens(30, seed=1), greedy_params(30))
    engine.step_modern()
    load = engine.engine.memory.load_checkpoint
    failures = iter([True])

    def fails_once(pages, slot):
        if next(failures, False):
            raise MemoryError("no room for the state")
        load(pages, slot)

    monkeypatch.setattr(engine.engine.memory, "load_checkpoint", fails_once)
    engine.add_request(2, [*PROMPT, 5], greedy_params(4))
    engine.step_modern()
    engine.engine.check_integrity()
    assert next(failures, None) is None, "no restore was tried"
    answers = finish(engine)
    assert is_greedy(tiny_model(), [*PROMPT, 5], answers[2].generated_tokens)
    assert is_greedy(tiny_model(), random_tokens(30, seed=1), answers[1].generated_tokens)
    engine.engine.check_integrity()


# States ------------------------------------------------------------------------------------------


def test_a_state_is_kept_in_the_middle_of_a_chunked_prefill():
    """Two prompts part at a position that no chunk ends at; the second one finds the junction while
    the first is being computed."""
    engine = door_engine(max_tokens=64)
    shared = random_tokens(150, seed=3)
    first, second = shared + random_tokens(90, seed=4), shared + random_tokens(70, seed=5)
    engine.add_request(1, first, greedy_params(4))
    engine.add_request(2, second, greedy_params(4))
    answers = finish(engine)
    assert answers[2].num_cached_tokens == len(shared)
    assert is_greedy(tiny_model(), first, answers[1].generated_tokens)
    assert is_greedy(tiny_model(), second, answers[2].generated_tokens)


def test_one_request_saves_while_another_restores():
    engine = door_engine()
    answer(engine, PROMPT, greedy_params(4))
    new = random_tokens(80, seed=6)
    engine.add_request(1, new, greedy_params(3))
    engine.add_request(2, [*PROMPT, 7], greedy_params(3))
    before = engine.engine.stats()["checkpoints_saved"]
    engine.step_modern()  # both prefills are in it
    assert engine.engine.context.ragged_layout().lengths == (1, len(new))  # single tokens first
    assert engine.engine.stats()["checkpoints_saved"] > before
    answers = finish(engine)
    assert answers[2].num_cached_tokens == len(PROMPT)
    assert is_greedy(tiny_model(), new, answers[1].generated_tokens)
    assert is_greedy(tiny_model(), [*PROMPT, 7], answers[2].generated_tokens)
    assert answer(engine, new, greedy_params(1)).num_cached_tokens == len(new)


def test_a_batch_of_decodes_cached_and_fresh_prefills():
    engine = door_engine()
    answer(engine, PROMPT, greedy_params(4))
    prompts = {
        1: random_tokens(33, seed=1),
        2: random_tokens(21, seed=2),
        3: [*PROMPT, *random_tokens(9, seed=3)],
        4: random_tokens(50, seed=4),
    }
    for request_id in (1, 2):
        engine.add_request(request_id, prompts[request_id], greedy_params(12))
    engine.step_modern()
    for request_id in (3, 4):
        engine.add_request(request_id, prompts[request_id], greedy_params(12))
    engine.step_modern()
    assert engine.engine.context.ragged_layout().lengths == (1, 1, 9, 50)
    answers = finish(engine)
    for request_id, prompt in prompts.items():
        assert is_greedy(tiny_model(), prompt, answers[request_id].generated_tokens)
    assert [answers[i].num_cached_tokens for i in prompts] == [0, 0, 96, 0]


# Small pools -------------------------------------------------------------------------------------


def test_a_pool_of_two_blocks_serves_one_request_after_the_other():
    model = tiny_model("*-")
    per_block = door_engine(model).engine.cache.spec
    pages = 1 + 2 * per_block.kv_pages_per_block
    size = 2 * per_block.slot_bytes + pages * per_block.page_bytes
    engine = door_engine(
        model,
        buffer_size_gb=size / (1 << 30),
        prefix_caching_mamba_gb=1 / (1 << 30),
        max_requests=2,
        max_sequence_length=64,
    )
    assert engine.context.kv_block_allocator.active_count == 2
    prompts = {i: random_tokens(20, seed=i) for i in range(3)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, greedy_params(12))
    answers = finish(engine)
    for request_id, prompt in prompts.items():
        assert is_greedy(model, prompt, answers[request_id].generated_tokens)
    with pytest.warns(UserWarning, match="do not fit"):
        assert answer(engine, prompts[0], greedy_params(13)).failed()
    engine.engine.check_integrity()


def test_nothing_leaks_over_many_waves_in_a_pool_that_is_always_full():
    engine = small_pool(48)
    generator = np.random.default_rng(0)
    for wave in range(10):
        prompts = {}
        for i in range(6):
            head = PROMPT[: int(generator.integers(0, 90))]
            tail = random_tokens(int(generator.integers(1, 40)), seed=wave * 10 + i)
            prompts[i] = head + tail
            engine.add_request(i, prompts[i], greedy_params(int(generator.integers(1, 12))))
        answers = finish(engine)
        assert all(request.succeeded() for request in answers.values())
        engine.engine.check_integrity()
        stats = engine.engine.stats()
        assert (stats["pages_in_use"], stats["leases"], stats["parked_bytes"]) == (0, 0, 0)
        assert stats["requests_running"] == stats["requests_waiting"] == 0
    assert engine.engine.stats()["checkpoints_evicted"] > 20
    for i, prompt in prompts.items():
        assert is_greedy(tiny_model(), prompt, answers[i].generated_tokens)


# Answers -----------------------------------------------------------------------------------------


def test_log_probs_are_complete_after_a_hit():
    engine = door_engine()
    answer(engine, PROMPT, greedy_params(4))
    prompt = [*PROMPT, *random_tokens(10, seed=1)]
    params = greedy_params(6, return_log_probs=True, skip_prompt_log_probs=True)
    hit = answer(engine, prompt, params)
    assert hit.num_cached_tokens == len(PROMPT) and len(hit.generated_log_probs) == 6
    params.skip_prompt_log_probs = False
    whole = answer(engine, prompt, params)  # needs every prompt row, so nothing is skipped
    assert whole.num_cached_tokens == 0
    assert (len(whole.prompt_log_probs), len(whole.generated_log_probs)) == (105, 6)
    tokens = prompt + whole.generated_tokens
    rows = full_logits(tiny_model(), tokens).log_softmax(-1)[:-1]
    expected = rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert whole.prompt_log_probs + whole.generated_log_probs == pytest.approx(expected, abs=1e-5)
    assert hit.generated_log_probs == pytest.approx(expected[105:], abs=1e-5)


@pytest.mark.parametrize("states_gb", [None, 4 * MIB])
def test_shared_blocks_are_never_rewritten(states_gb):
    """Their bytes stay equal while others share, extend and leave them, also where all tokens of
    the prompt are computed again."""
    engine = door_engine(prefix_caching_mamba_gb=states_gb)
    engine.add_request(1, PROMPT, greedy_params(60))
    engine.step_modern()
    pages = torch.from_numpy(handle(engine, 1).lease.block_table[: len(PROMPT) // BLOCK].ravel())
    bytes_before = engine.engine.memory.pool[pages.long()].clone()
    for seed in range(3):
        tail = random_tokens(5 + seed, seed=seed)
        engine.add_request(10 + seed, [*PROMPT, *tail], greedy_params(3))
        engine.step_modern()
        shared = handle(engine, 10 + seed).lease
        assert shared is None or (shared.block_table[: len(pages)].ravel() == pages.numpy()).all()
    while len(engine.requests) > 1:
        engine.step_modern()
    assert torch.equal(engine.engine.memory.pool[pages.long()], bytes_before)


def prompts_of(case: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to answer before, one after the other, and those to answer together."""
    other = random_tokens(70, seed=9)
    tails = [random_tokens(n, seed=n) for n in (9, 17, 30)]
    return {
        "exact": ([PROMPT], [PROMPT]),
        "partial": ([PROMPT], [PROMPT[:70] + tails[0]]),
        "missing": ([PROMPT], [other]),
        "concurrent": ([], [PROMPT, PROMPT, [*PROMPT, *tails[0]]]),
        "mixed": ([PROMPT], [PROMPT, PROMPT[:70] + tails[1], other, [*PROMPT, *tails[2]], other]),
    }[case]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("case", ["exact", "partial", "missing", "concurrent", "mixed"])
def test_with_the_cache_on_answers_are_those_with_it_off(case, chunked, scored):
    before, together = prompts_of(case)
    params = greedy_params(6, return_log_probs=scored, skip_prompt_log_probs=True)
    answers = []
    for enabled in (False, True):
        engine = door_engine(enable_prefix_caching=enabled, max_tokens=40 if chunked else 512)
        for prompt in before:
            answer(engine, prompt, params)
        for request_id, prompt in enumerate(together):
            engine.add_request(request_id, prompt, params)
        answers.append(finish(engine))
        if enabled:
            cached = sum(request.num_cached_tokens for request in answers[-1].values())
            assert (cached > 0) is (case != "missing")
    off, on = answers
    for request_id in off:
        assert on[request_id].generated_tokens == off[request_id].generated_tokens
        if scored:
            expected = pytest.approx(off[request_id].generated_log_probs, abs=1e-5)
            assert on[request_id].generated_log_probs == expected
            assert len(on[request_id].generated_log_probs) == 6
