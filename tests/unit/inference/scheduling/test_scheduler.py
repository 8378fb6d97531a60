"""Which tokens of which requests run next: tables of requests and plans, without any model."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.drafters import Drafts
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import Request, RequestStatus
from megatron_hybrid.inference.sampling_params import Sampled, SamplingParams
from megatron_hybrid.inference.scheduling.scheduler import Scheduler
from megatron_hybrid.inference.scheduling.step_plan import StepPlan, StepResult

BLOCK = 16
SPEC = CacheSpec(BLOCK, (KVGroup(1, 64),), state_bytes=2048, hidden_bytes=256)


class NoTiers:
    tiers = ()

    def poll(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    def take_loads(self) -> dict:
        return {}


def request(
    request_id: int, length: int, answer: int = 8, seed: int | None = None, **options
) -> Request:
    """A prompt of its own, or that of `seed`."""
    rng = np.random.default_rng(request_id if seed is None else seed)
    tokens = np.zeros(length + answer, np.int32)
    tokens[:length] = rng.integers(0, 1000, length)
    params = SamplingParams(num_tokens_to_generate=answer).resolved()
    return Request(request_id, tokens, length, params, 0, RequestOptions(**options))


def scheduler_of(
    *requests: Request, num_pages=200, max_requests=4, max_tokens=64, share=0.0
) -> Scheduler:
    """One to which these were added."""
    each = Scheduler(PrefixCache(SPEC, num_pages), NoTiers(), max_requests, max_tokens, share)
    for one in requests:
        each.add(one)
    return each


def run(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    """One step that draws token 1 everywhere; (request, start, end, whether it draws)."""
    plan = scheduler.schedule()
    drawn = {i: Sampled(1) for entry in (*plan.work, *plan.ready) for i in entry.draws}
    for owner in scheduler.complete(StepResult(drawn)):
        owner.tokens[owner.num_tokens] = 1
        owner.num_tokens += 1
        if owner.num_generated == owner.params.num_tokens_to_generate:
            owner.mark_answered("length")
            scheduler.finish(owner)
    scheduler.schedule_moves()
    scheduler.complete(StepResult())
    scheduler.cache.check_integrity()
    return [(work.request_id, work.start, work.end, bool(work.draws)) for work in plan.work] + [
        (ready.request_id, -1, -1, True) for ready in plan.ready
    ]


@pytest.mark.parametrize(
    ("lengths", "sizes", "plans"),
    [
        ([], {}, [[]]),
        ([10], {}, [[(0, 0, 10, True)], [(0, 10, 11, True)]]),
        # A prompt longer than the budget is cut; the next one gets what is left.
        (
            [100, 30],
            {},
            [
                [(0, 0, 64, False)],
                [(0, 64, 100, True), (1, 0, 28, False)],
                [(0, 100, 101, True), (1, 28, 30, True)],
                [(0, 101, 102, True), (1, 30, 31, True)],
            ],
        ),
        # First come, first served, as many as there are slots.
        (
            [10, 10, 10],
            {"max_requests": 2},
            [[(0, 0, 10, True), (1, 0, 10, True)], [(0, 10, 11, True), (1, 10, 11, True)]],
        ),
        # Decodes come before prefills, and their budget is taken first.
        (
            [4, 20],
            {"max_tokens": 8},
            [
                [(0, 0, 4, True), (1, 0, 4, False)],
                [(0, 4, 5, True), (1, 4, 11, False)],
                [(0, 5, 6, True), (1, 11, 18, False)],
            ],
        ),
    ],
)
def test_plans(lengths, sizes, plans):
    each = scheduler_of(*(request(*numbered) for numbered in enumerate(lengths)), **sizes)
    assert [run(each) for _ in plans] == plans


def steps_until_drawn(each: Scheduler, request_id: int) -> int:
    """Steps until a request has its first token; those before have all tokens that they may."""
    for number in range(1, 100):
        plan = run(each)
        if (request_id, True) in [(work[0], work[3]) for work in plan]:
            return number
        assert sum(end - start for _, start, end, _ in plan) == each.max_tokens
    raise AssertionError("no first token")


@pytest.mark.parametrize(
    ("share", "longs", "steps"),
    [(0.0, 1, 10), (0.1, 1, 10), (0.25, 1, 1), (0.0, 2, 21), (0.25, 2, 1)],
)
def test_a_long_prompt_leaves_a_share_of_its_steps_to_short_ones(share, longs, steps):
    """Of 64 tokens a quarter is 16, and a tenth too few for the short prompt; a second long prompt
    waits before it."""
    each = scheduler_of(*(request(number, 690) for number in range(longs)), share=share)
    run(each)
    each.add(request(2, 10, answer=1))
    assert steps_until_drawn(each, 2) == steps


def test_a_prompt_is_short_if_little_of_it_is_to_be_computed():
    each = scheduler_of(request(0, 90, answer=1), share=0.25)
    while each.has_work:
        run(each)
    each.add(request(1, 700))
    run(each)
    again = request(2, 100, answer=1)
    again.tokens[:90] = request(0, 90).tokens[:90]
    each.add(again)
    assert steps_until_drawn(each, 2) == 1 and again.prefix.skipped_tokens >= 84


def test_short_prompts_take_no_more_than_their_share():
    long, number = request(0, 700), 0
    each = scheduler_of(long, share=0.25, max_requests=8)
    while long.num_computed < 640:
        for _ in range(3):
            number += 1
            each.add(request(number, 10, answer=1))
        before = long.num_computed
        run(each)
        assert long.num_computed - before >= 48 or not before
    assert len(each.waiting) < 3 * number / 2 + 3


def test_a_short_prompt_without_room_costs_a_long_one_nothing():
    each = scheduler_of(request(0, 700), num_pages=45, share=0.25)  # 44 for the long one
    run(each)
    each.add(request(1, 16))
    assert steps_until_drawn(each, 0) == 10 and len(each.waiting) == 1


def test_nobody_is_preempted_or_overtaken_for_a_priority_once_it_ran():
    running, urgent = request(0, 10, priority=5), request(1, 10, priority=-5)
    each = scheduler_of(running, max_requests=1)
    run(each)
    each.add(urgent)
    assert run(each) == [(0, 10, 11, True)]
    each.abort()
    assert list(each.waiting) == [running, urgent]
    assert [work[0] for work in run(each)] == [0]


def test_a_preempted_request_starts_before_those_of_lower_priority():
    each, *_ = preempted()
    each.complete(StepResult({i: Sampled(1) for i in (0, 1)}))
    each.add(request(3, 10, priority=-1))
    assert [waiting.request_id for waiting in each.waiting] == [2, 3]


@pytest.mark.parametrize(("priority", "starts"), [(-1, True), (0, True), (1, False)])
def test_a_request_that_waits_for_a_prefill_is_overtaken_within_its_priority(priority, starts):
    each = scheduler_of(request(0, 90), max_tokens=32)
    run(each), run(each)
    each.add(request(1, 100, seed=0))
    each.add(request(2, 4, priority=priority))
    assert [work[0] for work in run(each)] == ([0, 2] if starts else [0])
    while each.has_work:
        run(each)


def with_samples(count: int) -> tuple[Scheduler, Request, StepPlan]:
    """A request for so many, and the plan that draws their first tokens."""
    one = request(0, 20)
    one.siblings = [request(number, 20, seed=0) for number in range(1, count)]
    each = scheduler_of(one)
    return each, one, each.schedule()


def test_samples_are_drawn_with_the_first_and_forked_from_it():
    each, one, plan = with_samples(3)
    assert list(plan.work[0].draws) == [0, 1, 2]
    owners = each.complete(StepResult({i: Sampled(1) for i in range(3)}))
    assert [owner.request_id for owner in owners] == [0, 1, 2]
    moves = each.schedule_moves()
    assert [(copy.request_id, copy.source_slot) for copy in moves.restores] == [
        (1, one.slot),
        (2, one.slot),
    ]
    # The partial last block is copied, too, and stays pinned until it is.
    sources = np.concatenate([copy.sources for copy in moves.restores])
    assert sources.tolist() == 2 * one.lease.block_table[1].tolist()
    assert (each.cache.allocator.ref_counts[sources] > 1).all()
    each.complete(StepResult())
    each.cache.check_integrity()


def test_a_sample_that_lacks_memory_for_its_fork_starts_from_the_cache():
    each, *_ = with_samples(2)
    owners = each.complete(StepResult({0: Sampled(1), 1: Sampled(1)}))
    for owner in owners:
        owner.num_tokens += 1
    each.schedule_moves()
    each.complete(StepResult(unrestored={1: "no memory"}))
    assert [waiting.request_id for waiting in each.waiting] == [1]
    assert run(each) == [(0, 20, 21, True), (1, 20, 21, True)]


def test_a_sample_that_is_cancelled_before_its_fork_leaves_nothing_behind():
    each, one, _ = with_samples(2)
    _, sibling = each.complete(StepResult({0: Sampled(1), 1: Sampled(1)}))
    each.cancel(sibling)
    assert not each.schedule_moves() and sibling.closed and each.running == [one]
    each.cache.check_integrity()


def test_a_request_that_ends_keeps_its_slot_until_its_state_is_saved():
    one = request(0, 20)
    each = scheduler_of(one, max_requests=1)
    run(each)
    each.schedule()
    each.complete(StepResult({0: Sampled(7)}))
    one.mark_answered("stop")  # token 7 is no part of the answer
    each.finish(one)
    assert not one.closed and not each.free_slots
    moves = each.schedule_moves()
    assert [(save.request_id, save.slot, save.position) for save in moves.saves] == [(0, 0, 21)]
    assert each.cache.match(one.tokens[:22]).skipped_tokens == 20
    each.complete(StepResult())
    assert one.closed and each.free_slots == [0]
    assert each.cache.match(one.tokens[:22]).skipped_tokens == 21
    each.cache.check_integrity()


def cached(length: int) -> Scheduler:
    """One that has answered a prompt, with states at its end and behind the answer."""
    each = scheduler_of(request(0, length, answer=1))
    while each.has_work:
        run(each)
    return each


def test_what_a_plan_loads_and_copies_is_pinned_until_it_has_run():
    each, one = cached(20), request(1, 30)
    one.tokens[:20] = request(0, 20).tokens[:20]
    each.add(one)
    plan = each.schedule()
    (restore,) = plan.restores
    assert (restore.request_id, restore.slot) == (1, one.slot)
    sources = np.concatenate([restore.checkpoint_pages, restore.sources])
    assert len(restore.sources) == len(restore.targets) == 1
    assert restore.targets[0] in one.lease.block_table
    assert (each.cache.allocator.ref_counts[sources] == 1).all()
    each.complete(StepResult({1: Sampled(1)}))
    assert (each.cache.allocator.ref_counts[sources] == 0).all()
    each.cache.check_integrity()


def test_a_request_that_lacks_memory_when_alone_fails_its_step():
    each, one = cached(20), request(1, 20, seed=0)
    each.add(one)
    each.schedule()
    with pytest.raises(MemoryError, match="no memory"):
        each.complete(StepResult(unrestored={1: "no memory"}))
    each.abort()
    assert list(each.waiting) == [one]
    assert run(each) == [(1, 0, 20, True)]


def preempted() -> tuple[Scheduler, list[Request], StepPlan]:
    """Three requests, and the plan for which the last of them makes room."""
    requests = [request(i, 30, answer=40) for i in range(3)]
    each = scheduler_of(*requests, num_pages=10)
    while True:
        plan = each.schedule()
        if each.num_preemptions:
            return each, requests, plan
        drawn = {i: Sampled(1) for work in plan.work for i in work.draws}
        for owner in each.complete(StepResult(drawn)):
            owner.num_tokens += 1


def test_the_last_to_come_makes_room_and_goes_on_at_its_token():
    each, requests, plan = preempted()
    parked = requests[-1]
    (park,) = plan.parks
    done = parked.num_computed
    assert parked.status is RequestStatus.WAITING
    assert (park.request_id, park.num_tokens) == (2, done) and parked.parked_tokens == done
    owners = each.complete(StepResult({i: Sampled(1) for i in (0, 1)}))
    assert [owner.request_id for owner in owners] == [0, 1]
    each.cancel(requests[0])
    each.schedule_moves()
    each.complete(StepResult())
    plan = each.schedule()
    (unpark,) = plan.restores
    assert (unpark.request_id, unpark.slot) == (2, parked.slot)
    (again,) = [work for work in plan.work if work.request_id == 2]
    assert (again.start, again.end, list(again.draws)) == (done, done + 1, [2])
    assert all(mine is its for mine, its in zip(unpark.tables, again.tables, strict=True))
    # Others see its blocks when its bytes are there.
    own = parked.tokens[:done]
    assert each.cache.match(own).shared_tokens < done
    each.complete(StepResult({i: Sampled(1) for i in (1, 2)}))
    assert each.cache.match(own).shared_tokens == done
    each.cache.check_integrity()


def test_after_two_failed_steps_requests_start_one_at_a_time_until_they_get_on():
    requests = [request(i, 10) for i in range(3)]
    each = scheduler_of(*requests)
    for _ in range(2):
        assert [work.request_id for work in each.schedule().work] == [0, 1, 2]
        assert each.fail() == []
    each.add(request(3, 10))
    assert [work.request_id for work in each.schedule().work] == [0]  # nobody beside it
    assert each.fail() == requests[:1]
    each.cancel(requests[0])
    assert [number for number, *_ in run(each)] == [1]
    assert [number for number, *_ in run(each)] == [1, 2]
    assert [number for number, *_ in run(each)] == [1, 2, 3]
    assert each.num_failures == 3 and each.num_restarts == 3 + 3 + 1
    # Those that got on start anew.
    each.schedule()
    assert each.fail() == [] and len(each.schedule().work) == 3


def test_a_plan_is_plain_data():
    plan = scheduler_of(request(0, 40)).schedule()
    again = pickle.loads(pickle.dumps(plan))
    assert isinstance(again, StepPlan) and repr(again) == repr(plan)


def test_it_imports_no_torch():
    """Nor what touches the device."""
    code = """
import sys
import megatron_hybrid.inference.scheduling.scheduler
loaded = {name.removeprefix("megatron_hybrid.inference.") for name in sys.modules}
assert not loaded & {"torch", "megatron", "memory", "context", "model_runner"}, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Counting:
    """A drafter that goes on counting."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [int(request.tokens[request.num_tokens - 1]) + 1 + i for i in range(most)]


def test_drafts_take_what_decodes_and_prompts_leave():
    each = scheduler_of(request(0, 4), request(1, 4), max_tokens=10)
    each.draft_planner.drafts = Drafts(Counting(), 5, vocab_size=2000)
    run(each)
    each.add(request(2, 4))
    plan = each.schedule()
    assert [len(work.tokens) for work in plan.work] == [1, 5, 4]
    assert [len(work.draft_draws) for work in plan.work] == [0, 4, 0]


def test_a_lost_slot_and_a_waiting_request_with_a_slot_are_found():
    one = request(0, 20)
    each = scheduler_of(one)
    each.check_integrity()
    one.slot = 2
    with pytest.raises(RuntimeError, match="waiting request 0 holds a lease or a slot"):
        each.check_integrity()
    one.slot = -1
    run(each)
    each.check_integrity()
    each.free_slots.pop()
    with pytest.raises(RuntimeError, match="live slots do not add up"):
        each.check_integrity()
