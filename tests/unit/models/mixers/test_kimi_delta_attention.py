"""Kimi Delta Attention's sizes. Its recurrence, written out: `../test_gradients.py`."""

from small_models import small_config


def test_heads_follow_from_the_width():
    config = small_config("K", linear_num_key_heads=None, linear_num_value_heads=None)
    assert config.linear_num_key_heads == 3
    assert config.linear_num_value_heads is None  # has no meaning here
