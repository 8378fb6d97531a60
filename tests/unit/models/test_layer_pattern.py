"""The pattern language."""

import pytest
from differential import SYMBOLS
from small_models import small_config

from megatron_hybrid.models.layer_pattern import LAYER_KINDS, LayerPattern, split_predictions

parse = LayerPattern.parse


def test_parse_gives_every_symbol_and_is_done_once():
    assert parse("MG*|W-").marked_stages == ("MG*", "W-")
    assert parse("MG*|W-").symbols == "MG*W-"
    config = small_config("M-*-")
    assert config.pattern is parse("M-*-") is config.for_layer(2).pattern


def test_random_runs_mix_every_kind():
    assert set(SYMBOLS) == LAYER_KINDS.keys()


MIXED_PARTS = ("M/", "M/MM/M", "M/MM/", "M/M|M", "M/Z", "M/P")
SAME = "must all be the same one layer or more"
MEGATRONS = "DeepSeek sparse attention, which is not"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        *((each, ["a model needs one layer or more"]) for each in ("", None, 3)),
        *((each, ["pipeline stage without a layer"]) for each in ("|M", "M|", "M||M", "|", "/M")),
        *((each, [SAME, repr(each.split("/")[1:])]) for each in MIXED_PARTS),
        *((f"MM*{each}-", ["unknown symbol", f"{each!r} at place 4 of 5"]) for each in "mN é"),
        ("N", [repr(known) for known in LAYER_KINDS]),
        ("*D", [MEGATRONS, "'D' at place 2 of 2"]),
        ("D/M", [MEGATRONS, "'D' at place 1 of 3"]),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, words):
    with pytest.raises(ValueError) as error:
        parse(pattern)
    assert [word for word in words if word not in str(error.value)] == []


def test_layers_for_multi_token_prediction_are_none_of_the_model():
    pattern = parse("M-|M*-/*-/*-")
    assert pattern.symbols == "M-M*-"
    assert pattern.stages(2) == ("M-", "M*-")
    assert pattern.predictions == ("*-", "*-")
    assert parse("M-").predictions == ()


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
