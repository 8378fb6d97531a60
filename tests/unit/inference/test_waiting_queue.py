"""The order of those that wait, against a list that is sorted."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import request

from megatron_hybrid.inference.waiting_queue import WaitingQueue

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
        expected = back + sorted(new, key=lambda each: (each.priority, each.request_id))
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
        expected = back + sorted(new, key=lambda each: (each.priority, each.request_id))
        assert list(queue) == expected and len(queue) == len(expected)
        assert all(each in queue for each in expected)
        assert not any(each in queue for each in started)
