"""What an engine compiles on a GPU that is not there: all of it before its first request."""

import json

from compiling_process import HELPERS, run_compiling

ALL_KINDS = "MGKSC*+WLE-"


def test_a_warm_up_compiles_all_that_later_requests_launch():
    found = json.loads(run_compiling(str(HELPERS / "compiles.py"), ALL_KINDS))
    stats = found["stats"]
    assert stats["preemptions"] and stats["fetches"] and stats["checkpoints_evicted"]

    assert len(found["made"]) > 50
    assert {kind: kernels for kind, kernels in found["later"].items() if kernels} == {}
    # Without it the first request waits for the same ones, and the second for none.
    first, *others = found["cold"].values()
    assert sorted(first) == sorted(found["made"]) and others == [[], []]
