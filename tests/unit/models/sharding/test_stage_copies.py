"""Which layers own a shared block's parameters on each pipeline stage."""

import pytest
from small_models import small_config

from megatron_hybrid.models.sharding.stage_copies import shared_block_owners


@pytest.mark.parametrize(
    ("pattern", "num_blocks", "owners"),
    [
        ("ZMZ-ZZ", 1, [{0: 0}]),
        ("ZMZ-ZZ", 2, [{0: 0}, {0: 2}]),
        ("ZM|Z-|ZZ", 1, [{0: 0, 1: 2, 2: 4}]),
        ("ZM|Z-|ZZ", 2, [{0: 0, 2: 4}, {1: 2, 2: 5}]),
        ("MM|ZZZ", 2, [{1: 2}, {1: 3}]),
        ("Z|M", 3, [{0: 0}, {}, {}]),
    ],
)
def test_the_first_layer_of_each_stage_owns_the_block(pattern, num_blocks, owners):
    config = small_config(
        pattern,
        num_shared_blocks=num_blocks,
        pipeline_model_parallel_size=pattern.count("|") + 1,
    )
    assert shared_block_owners(config) == owners
