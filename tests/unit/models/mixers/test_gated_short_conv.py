"""What the config of gated short convolutions refuses."""

import pytest
from small_models import small_config

HIDDEN = 48


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"short_conv_kernel": 1}, "short_conv_kernel is 1; a causal convolution needs"),
        (
            {"hidden_size": 49, "tensor_model_parallel_size": 2},
            "hidden_size is 49, which does not divide evenly",
        ),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError) as error:
        small_config("C", **fields)
    assert message in str(error.value)
