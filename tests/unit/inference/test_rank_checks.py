"""What the ranks of an engine compare before they serve."""

import torch
from reference import tiny_model

from megatron_hybrid.distributed.rendezvous import Member, first_difference
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.rank_checks import what_must_be_equal
from megatron_hybrid.models.hybrid_model import build_hybrid_model


def difference(*seeds):
    """Between the stages of a pipeline whose weights are drawn with these seeds."""
    config, found = tiny_model("M*").config, []
    for stage, seed in enumerate(seeds):
        torch.manual_seed(seed)
        model = build_hybrid_model(config)
        named = what_must_be_equal(InferenceConfig(), model, stage)
        found.append((Member(stage, "host", 0), named))
    return first_difference(found)


def test_random_weights_of_all_stages_are_of_one_seed():
    assert difference(3, 3) is None
    assert difference(3, 4) == (
        "the seed of the random weights differs between ranks: rank 0 on host has 3, rank 1 on "
        "host has 4; make it equal"
    )
