"""Every value of a recipe is legal or refused by name, whatever stands there."""

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_hybrid.models.config.hybrid_config import SAVED_FIELDS, HybridConfig, decode_fields
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.utils.core_errors import core_refusals

VALUES = [math.nan, math.inf, -1, 1e20, 10**20, "1e20", "abc", [], {}, None]
MODEL = {
    "layer_pattern": "MG*+W-E",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "sliding_window": 8,
    "num_moe_experts": 4,
    "vocab_size": 64,
}
HINTS = get_type_hints(Recipe)
del HINTS["model"], HINTS["tokenizer"]
NEEDED = {
    "model": MODEL,
    "data": {"sequence_length": 16, "train": ["text"]},
    "grpo": {"reward": "module:function"},
}
OTHERS = {"tokenizer": "demo", "data": NEEDED["data"]}
SECTIONS = {
    "model": HybridConfig,
    **{name: get_args(hint)[0] if get_args(hint) else hint for name, hint in HINTS.items()},
}
NEGATIVE = {
    *("glu_linear_offset", "moe_router_force_biased", "residual_multiplier", "stream_multiplier"),
    *(
        "kda_decay_bound",
        "value_multiplier",
        "embedding_multiplier",
        "logits_multiplier",
        "mlp_gate_multiplier",
        "mlp_output_multiplier",
    ),
    *(f"{part}_{way}_multiplier" for part in ("attention", "mamba") for way in ("input", "output")),
    *(field.name for field in dataclasses.fields(HybridConfig) if field.name not in SAVED_FIELDS),
}
"""Fields of numbers that may be below 0. Of those of core alone, `ranges` have some."""


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("ignore")
def test_every_value_of_every_field_is_legal_or_refused_by_name(section):
    kind = SECTIONS[section]
    needed = NEEDED.get(section, {})
    wrong = []
    for name in (field.name for field in dataclasses.fields(kind)):
        for value in VALUES:
            values = {**needed, name: value}
            try:
                kind(**decode_fields(values)) if kind is HybridConfig else kind.of(section, values)
            except ValueError as error:
                if name not in str(error) and not str(error).startswith("megatron-core refuses"):
                    wrong.append(f"{name}={value!r}: {error}")
            else:
                if isinstance(value, int | float) and not (value == -1 and name in NEGATIVE):
                    wrong.append(f"{name}={value!r} is taken")
    assert wrong == []


def test_numbers_of_a_model_may_be_written_as_yaml_reads_text():
    recipe = Recipe.of({"model": {**MODEL, "rotary_base": "1e5"}, **OTHERS})
    assert recipe.model_config(64).rotary_base == 1e5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"pretrained": 3}, "model.pretrained is 3; it must be a folder"),
        ({"layer_overrides": {"W": 3}}, "layer_overrides['W'] is 3; it must be a mapping"),
        ({"moe_aux_loss_coeff": [0.1, "x"]}, "moe_aux_loss_coeff[1] is 'x'; it must be a number"),
        ({"hidden_size": 0.5}, "hidden_size is 0.5; it must be a whole number"),
        ({"init_method_std": math.inf}, "init_method_std is inf; it must be a finite number, of"),
    ],
)
def test_a_refused_value_comes_with_what_is_legal(model, message):
    with pytest.raises(ValueError) as error:
        Recipe.of({"model": {**MODEL, **model}, **OTHERS}).model_config(64)
    assert message in str(error.value)


def test_an_assertion_of_core_is_told_as_what_it_means():
    with pytest.raises(
        ValueError,
        match=r"^megatron-core refuses inference_fuse_tp_communication"
        r"=True: .* only supported for .* \(transformer_config.py:\d+\)$",
    ):
        HybridConfig(**MODEL, inference_fuse_tp_communication=True)
    schedule = (None, 0.0, 1.0, 2.0, 1, 9, "linear", 0.0, 0.0, 9, "constant")
    needed = r"refuses this run: it needs `max_lr >= min_lr` \("
    with pytest.raises(ValueError, match=needed), core_refusals("this run"):
        OptimizerParamScheduler(*schedule)
    with pytest.raises(AssertionError, match="ours"), core_refusals("this run"):
        raise AssertionError("ours")
