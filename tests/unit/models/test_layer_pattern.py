"""The pattern language."""

import pytest
from differential import SYMBOLS
from small_models import small_config

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import KINDS, LayerPattern, split_predictions

parse = LayerPattern.parse


def test_parse_gives_every_symbol():
    assert parse("MG*|W-").marked_stages == ("MG*", "W-")
    assert parse("MG*|W-").symbols == "MG*W-"


def test_a_pattern_is_parsed_once():
    config = small_config("M-*-")
    assert config.pattern is parse("M-*-") is config.for_layer(2).pattern


def test_random_runs_mix_every_kind():
    assert set(SYMBOLS) == KINDS.keys()


@pytest.mark.parametrize("symbol", ["m", "Q", " ", "é"])
def test_unknown_symbol_is_named_with_its_place_and_the_known_ones(symbol):
    with pytest.raises(ValueError, match="unknown symbol") as error:
        parse(f"MM*{symbol}-")
    assert f"{symbol!r} at place 4 of 5" in str(error.value)
    assert all(f"'{known}'" in str(error.value) for known in KINDS)


@pytest.mark.parametrize("pattern", ["M/", "M/MM/M", "M/MM/", "M/M|M", "M/Z", "M/P"])
def test_parts_for_multi_token_prediction_are_equal_layers(pattern):
    with pytest.raises(ValueError, match="must all be the same one layer or more") as error:
        parse(pattern)
    assert repr(pattern.split("/")[1:]) in str(error.value)


def test_layers_for_multi_token_prediction_are_none_of_the_model():
    pattern = parse("M-|M*-/*-/*-")
    assert pattern.symbols == "M-M*-"
    assert pattern.stages(2) == ("M-", "M*-")
    assert pattern.predictions == ("*-", "*-")
    assert parse("M-").predictions == ()
    with pytest.raises(ValueError, match="pipeline stage without a layer"):
        parse("/M")


@pytest.mark.parametrize("pattern", ["*D", "D/M"])
def test_the_symbol_with_another_meaning_in_megatron_is_refused(pattern):
    with pytest.raises(ValueError, match="DeepSeek sparse attention, which is not") as error:
        parse(pattern)
    assert f"'D' at place {pattern.index('D') + 1} of {len(pattern)}" in str(error.value)


def test_a_config_from_before_the_renaming_names_the_remedy():
    old = {**small_config("*-").to_dict(), "layer_pattern": "*D"}
    old["layer_overrides"] = {"D": {"layer_scalar": True}}
    with pytest.raises(ValueError, match="is MLP and experts side by side, which is 'B' now: ren"):
        HybridConfig.from_dict(old)
    with pytest.raises(ValueError, match="layer_overrides has the key 'D'"):
        HybridConfig.from_dict({**old, "layer_pattern": "*-"})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("MM*-", ("MM*-", [])),
        ("M-|M*-/MM/MM", ("M-|M*-", ["MM", "MM"])),
        ("*D/D", ("*D", ["D"])),
        ("M/", ("M", [""])),
        ("/M", ("", ["M"])),
        ("", ("", [])),
    ],
)
def test_parts_of_megatrons_patterns(pattern, expected):
    assert split_predictions(pattern) == expected


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
    assert list(parse(pattern).stages(num_stages)) == expected


@pytest.mark.parametrize(
    ("pattern", "num_stages", "message"),
    [
        ("M|M*|-", 2, "has 3 pipeline stages, but pipeline_model_parallel_size is 2. Use 1 '|'"),
        ("MM*", 2, "has 3 layers, which do not divide evenly over 2 pipeline stages"),
    ],
)
def test_stages_that_do_not_fit(pattern, num_stages, message):
    with pytest.raises(ValueError) as error:
        parse(pattern).stages(num_stages)
    assert message in str(error.value)
