"""The pattern language."""

import pytest
from differential import SYMBOLS

from megatron_hybrid.models.layer_pattern import KINDS, layer_symbols, parse, split_stages


def test_parse_gives_every_symbol():
    assert parse("MG*|W-") == ["M", "G", "*", "|", "W", "-"]
    assert layer_symbols("MG*|W-") == ["M", "G", "*", "W", "-"]


def test_random_runs_mix_every_kind():
    assert set(SYMBOLS) == KINDS.keys()


@pytest.mark.parametrize("symbol", ["m", "Q", " ", "/", "é"])
def test_unknown_symbol_is_named_with_its_place_and_the_known_ones(symbol):
    with pytest.raises(ValueError, match="unknown symbol") as error:
        parse(f"MM*{symbol}-")
    assert f"{symbol!r} at place 4 of 5" in str(error.value)
    assert all(f"'{known}'" in str(error.value) for known in KINDS)


@pytest.mark.parametrize("pattern", ["", None, 3])
def test_no_pattern(pattern):
    with pytest.raises(ValueError, match="a model needs one layer or more"):
        parse(pattern)


@pytest.mark.parametrize("pattern", ["|M", "M|", "M||M", "|"])
def test_stage_without_a_layer(pattern):
    with pytest.raises(ValueError, match="pipeline stage without a layer"):
        parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "num_stages", "expected"),
    [
        ("MM*-", 1, ["MM*-"]),
        ("MM*-", 2, ["MM", "*-"]),
        ("M|M*-", 2, ["M", "M*-"]),
        ("M|M*|-", 1, ["MM*-"]),
        ("M|M*|-", 3, ["M", "M*", "-"]),
    ],
)
def test_stages(pattern, num_stages, expected):
    assert ["".join(stage) for stage in split_stages(pattern, num_stages)] == expected


@pytest.mark.parametrize(
    ("pattern", "num_stages", "message"),
    [
        ("M|M*|-", 2, "has 3 pipeline stages, but pipeline_model_parallel_size is 2. Use 1 '|'"),
        ("MM*", 2, "has 3 layers, which do not divide evenly over 2 pipeline stages"),
    ],
)
def test_stages_that_do_not_fit(pattern, num_stages, message):
    with pytest.raises(ValueError) as error:
        split_stages(pattern, num_stages)
    assert message in str(error.value)
