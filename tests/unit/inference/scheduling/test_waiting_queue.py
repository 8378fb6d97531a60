"""The order of those that wait, against a list that is sorted."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import request

from megatron_hybrid.inference.scheduling.waiting_queue import WaitingQueue

OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(-2, 2)),
    st.tuples(st.just("start"), st.integers(0, 9)),
    st.tuples(st.just("come back"), st.integers(0, 9)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATIONS, max_size=40))
def test_the_queue_is_sorted_by_priority_and_arrival_behind_those_that_came_back(operations):
    queue, back, new, started = WaitingQueue(), [], [], []
    for number, (operation, value) in enumerate(operations):
        expected = back + sorted(new, key=lambda each: (each.options.priority, each.request_id))
        if operation == "add":
            new.append(request(number, 1, answer=1, priority=value))
            queue.add(new[-1])
        elif operation == "start" and expected:
            one = expected[value % len(expected)]
            started.append(one)
            queue.discard(one)
            queue.discard(one)  # a second time has no effect
            back, new = ([each for each in part if each is not one] for part in (back, new))
        elif operation == "come back" and started:
            back.insert(0, started.pop(value % len(started)))
            queue.put_first(back[0])
        expected = back + sorted(new, key=lambda each: (each.options.priority, each.request_id))
        assert list(queue) == expected and len(queue) == len(expected)
        assert all(each in queue for each in expected)
        assert not any(each in queue for each in started)


def of_tenant(number: int, tenant: str, priority: int = 0):
    return request(number, 1, answer=1, tenant=tenant, priority=priority)


def start_all(queue: WaitingQueue) -> list[str]:
    """Tenants in the order of their starts."""
    order = []
    while queue:
        first = next(iter(queue))
        queue.discard(first)
        order.append(first.options.tenant)
    return order


def test_tenants_take_turns_however_many_requests_one_has_queued():
    queue = WaitingQueue()
    for number in range(300):
        queue.add(of_tenant(number, "many"))
    for number in range(2):
        queue.add(of_tenant(300 + number, "few"))
    queue.add(of_tenant(400, "late"))
    assert start_all(queue)[:6] == ["many", "few", "late", "many", "few", "many"]


def test_who_comes_later_waits_for_no_more_than_one_turn_of_each():
    queue = WaitingQueue()
    for number in range(100):
        queue.add(of_tenant(number, "many"))
    for _ in range(50):
        queue.discard(next(iter(queue)))
    queue.add(of_tenant(100, "late"))
    queue.add(of_tenant(101, "urgent", priority=-1))
    assert start_all(queue)[:3] == ["urgent", "many", "late"]


def test_each_sample_of_a_request_is_a_turn():
    queue = WaitingQueue()
    for number in range(2):
        one = of_tenant(number, "samples")
        one.siblings = [one, one]
        queue.add(one)
    for number in range(2, 6):
        queue.add(of_tenant(number, "single"))
    assert start_all(queue) == [
        *("samples", "single", "single", "single"),
        *("samples", "single"),
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), max_size=30))
def test_requests_of_one_tenant_and_priority_start_in_order_of_arrival(given):
    queue = WaitingQueue()
    for number, (tenant, priority) in enumerate(given):
        queue.add(of_tenant(number, tenant, priority=priority))
    for tenant, priority in set(given):
        numbers = [
            r.request_id
            for r in queue
            if (r.options.tenant, r.options.priority) == (tenant, priority)
        ]
        assert numbers == sorted(numbers)


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Call it, and interrupt it at its n-th line. Returns whether it has so many."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_a_call_that_was_interrupted_anywhere_leaves_nothing_that_discard_does_not_take_out():
    others = [of_tenant(number, tenant) for number, tenant in enumerate("aab")]
    for calls, line in product((["add"], ["add", "discard"]), range(50)):
        queue, one = WaitingQueue(), of_tenant(9, "a")
        for other in others:
            queue.add(other)
        for name in calls[:-1]:
            getattr(queue, name)(one)
        if not interrupted(partial(getattr(queue, calls[-1]), one), line):
            assert line > 5
        queue.discard(one)
        assert one not in queue and sorted(each.request_id for each in queue) == [0, 1, 2]
        queue.add(one)
        assert sorted(start_all(queue)) == ["a", "a", "a", "b"]
