"""Which stretchings of RoPE are refused."""

import pytest

from megatron_hybrid.models.config.position import check_rotary_scaling


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'; use one of"),
        ({"factor": 2.0}, "rope_type None"),
        ({"rope_type": "linear"}, r"\['factor'\] is None"),
        ({"rope_type": "yarn", "factor": -1, "original_max_position_embeddings": 8}, "is -1"),
        ({"rope_type": "proportional", "partial_rotary_factor": "0.5"}, "is '0.5'"),
    ],
)
def test_unusable_scalings_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        check_rotary_scaling(scaling)
