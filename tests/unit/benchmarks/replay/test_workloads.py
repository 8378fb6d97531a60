"""The seeded workloads are the ones that published figures refer to."""

from itertools import islice

import numpy as np
import pytest
from replayed import digest

from benchmarks.replay.workloads import WORKLOADS

PUBLISHED = {  # of the requests [0, 60) with limit=60, and [1500, 1560) without a limit
    "short-classify": ("f7a95a0f8a1b7862", "f2ee680c2430f8a9"),
    "chat": ("1294de9b2e39e3a0", "3e829044d8466fe3"),
    "agent": ("3434b309c186c7ee", "f26c35b02d5bf21b"),
    "rl-group": ("57de3191f72b04db", "b1987288eca7945b"),
    "rag-fork": ("1e254c3bfc483ad3", "62ba869f84e850e0"),
    "code": ("acc2355aca654e7c", "352f011451dcad33"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_requests_are_the_published_ones(name):
    generate = WORKLOADS[name].generate
    assert (digest(generate(60)), digest(islice(generate(), 1500, 1560))) == PUBLISHED[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_trace_is_in_order_and_repeats(name):
    requests = list(WORKLOADS[name].generate(80))
    assert digest(requests) == digest(WORKLOADS[name].generate(80))
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    turns = {}
    for request in requests:
        assert request.prompt.dtype == request.output.dtype == np.int32
        assert len(request.prompt) and len(request.output)
        before = turns.get(request.session)
        assert request.turn == (0 if before is None else before.turn + 1)
        if before is not None:  # the conversation goes on
            n = len(before.prompt)
            assert np.array_equal(request.prompt[:n], before.prompt)
        turns[request.session] = request


def test_fluctuating_prefixes_share_what_they_should():
    bases, shared = {}, {}
    for request in WORKLOADS["fluctuating"].generate(300):
        key = tuple(request.prompt[:8])
        if key not in bases:
            bases[key] = request.prompt
            assert len(request.prompt) == 6000
            continue
        n = min(len(bases[key]), len(request.prompt))
        shared.setdefault(key, []).append(int((bases[key][:n] != request.prompt[:n]).argmax()))
    for lengths in shared.values():
        assert lengths[:2] == [5120, 4992][: len(lengths)]
        assert all(4992 <= length <= 5120 for length in lengths)
    assert len({length for lengths in shared.values() for length in lengths}) > 50
