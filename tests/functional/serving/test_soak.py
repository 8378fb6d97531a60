"""A quarter of a minute of what `make soak` does for five."""

import pytest
from server_soak import soak


@pytest.mark.matrix
def test_no_token_and_no_lease_is_lost_under_load():
    counts = soak(seconds=5, count=24)
    assert counts["bytes"] < 64 << 20
