"""A quantization_config is read through one table: what is not in it is refused by name."""

from collections.abc import Mapping

import pytest

from megatron_hybrid.checkpoints.quantization_config import _METHODS, Quantization
from megatron_hybrid.checkpoints.tensor_files import CheckpointError

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "frozen",
    "global_compression_ratio": 1.9,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": ["Linear"]},
    "transform_config": {},
    "version": "0.20.0",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": None,
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "actorder": "static",
                "block_structure": None,
                "dynamic": False,
                "group_size": 64,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": None,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
                "zp_dtype": None,
            },
        }
    },
}
LAYER = "model.layers.0.mlp.up_proj"
ZERO = f"{LAYER}.weight_zero_point"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (COMPRESSED, ("compressed-tensors", ((1, 64),), 0, False, ((("Linear",), ""),))),
        (GPTQ, ("gptq", ((1, 32),), 32, True)),
        (
            GPTQ | {"dynamic": {"-:a": {}, "b": {"bits": 16, "group_size": 64}}},
            ("gptq", ((1, 32),), 32, True),
        ),
        (GPTQ | {"group_size": -1}, ("gptq", ((128, 128),), 0, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, ("gptq", ((1, 32),), 32, False)),
        (GPTQ | {"format": "gptq_v2", "method": "gptq"}, ("gptq", ((1, 32),), 32, False)),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
            ("gptq", ((128, 128),), 0, True),
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round", "group_size": 64},
            ("gptq", ((1, 64),), 64, False),
        ),
        *(
            ({"quant_method": "auto-round", **packing}, ("gptq", ((128, 128),), 0, True))
            for packing in ({}, {"packing_format": None}, {"packing_format": "auto"})
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
            ("awq", ((128, 128),), 0, False),
        ),
        (
            {"quant_method": "awq", "version": "GEMM", "q_group_size": 16, "w_bit": 4},
            ("awq", ((1, 16),), 16, False),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
            ("modelopt", ((128, 128),), 0, False),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 16], "fmt": "e4m3"},
            ("fp8", ((32, 16),), 0, False),
        ),
    ],
)
def test_what_is_known_is_read(config, expected):
    assert Quantization.read(config, "config.json") == Quantization(*expected)


def nested(**weights) -> dict:
    """Groups with other fields of weights."""
    (group,) = COMPRESSED["config_groups"].values()
    return {"config_groups": {"g": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (COMPRESSED | {"transform_config": {"R1": {"type": "hadamard"}}}, r"transform_config=\{'R"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format='sp"),
        (COMPRESSED | {"moe_sparsity_config": {"layers": [3]}}, "moe_sparsity_config=.* not read"),
        (COMPRESSED | {"format": "marlin-24"}, "format='marlin-24'; float-quantized, .* are read"),
        (COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}}, r"config_groups.W4A16=\['Linear"),
        (COMPRESSED | nested(actorder="group"), "config_groups.g.weights.actorder='group'"),
        (COMPRESSED | nested(num_bits=3), "config_groups.g.weights.num_bits=3; 4, 8 are read"),
        (COMPRESSED | nested(hadamard=True), "weights.hadamard=True, a field that is not read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq, gptq_v2 are read"),
        (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard', a field that is not read"),
        (GPTQ | {"adapter": {"name": "lora"}}, "adapter="),
        (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}, r"dynamic.\+:.\*up.\*.bits=8"),
        (GPTQ | {"dynamic": {"a": {"group_size": 64}}}, r"dynamic.a.group_size=64; .* 32, is read"),
        (
            {"quant_method": "auto-round", "extra_config": {"a": {"group_size": 16}}},
            "extra_config.a.group_size=16",
        ),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype='int16'; int32 are read"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'; gemm are read"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "packing_format="),
        ({"quant_method": "auto-round", "rotation_config": {"size": 32}}, "rotation_config="),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True},
            "pre_quant_scale=True; False are read",
        ),
        (
            {"quant_method": "modelopt", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
            "quantized_layers.a.quant_algo='W4A8_AWQ'",
        ),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype='fp4'; fp8 are read"),
        ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "weight_scale_semantics="),
        ({"quant_method": "torchao", "quant_type": {}}, "quant_method='torchao'; fp8, "),
        ({"quant_method": None}, "quant_method=None"),
        (GPTQ | {"group_size": "32"}, "group_size='32'; whole numbers from -1 on are read"),
        (GPTQ | {"dynamic": {"a": {"bits": "4"}}}, "dynamic.a.bits='4'; 4, and 16 or more are"),
        (COMPRESSED | {"config_groups": [1]}, r"config_groups=\[1\]; objects are read"),
        (COMPRESSED | nested(block_structure="2:4"), "block_structure='2:4'; two whole numbers"),
        (COMPRESSED | nested(symmetric="no"), "symmetric='no'; False, True are read"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]; two"),
    ],
)
def test_what_nobody_reads_is_refused_by_name(config, words):
    with pytest.raises(CheckpointError, match=words):
        Quantization.read(config, "config.json")


def fields(rules, path=()):
    """Paths of all fields in the table."""
    for name, rule in rules.items():
        yield (*path, name)
        if isinstance(rule, Mapping):
            yield from fields(rule, (*path, name))


@pytest.mark.parametrize(
    "value", [None, True, 0, -7, 2.5, "4", "re:[", [], [3], [0, 0], {"a": None}]
)
@pytest.mark.parametrize("method", _METHODS)
def test_a_value_of_any_kind_is_read_or_refused_by_name(method, value):
    for *path, name in fields(_METHODS[method]):
        config = {name: value}
        for outer in reversed(path):
            config = {outer: config}
        try:
            found = Quantization.read({"quant_method": method} | config, "config.json")
            assert found.announced(LAYER) <= {f"{LAYER}.g_idx", ZERO}
        except CheckpointError as error:
            assert f"{'.'.join((*path, name))}=" in str(error) or name == "quant_method"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(["Linear"], False)], {ZERO}),
        ([(None, False)], {ZERO}),
        ([(["Linear"], True)], set()),
        ([(["Linear"], True), (["re:.*up_proj"], False)], {ZERO}),
        ([(["Linear"], False), (["re:.*up_proj"], True)], set()),
        ([(["Linear"], False), (["lm_head"], True)], {ZERO}),
        ([(["Linear"], False), (["Conv1d"], True)], set()),
    ],
)
def test_groups_say_which_layers_have_zero_points(groups, expected):
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            str(i): {"targets": targets, "weights": {"symmetric": symmetric}}
            for i, (targets, symmetric) in enumerate(groups)
        },
    }
    assert Quantization.read(config, "config.json").announced(LAYER) == expected


@pytest.mark.parametrize("method", _METHODS)
def test_a_field_that_says_nothing_is_no_reason_to_refuse(method):
    config = {"quant_method": method, "unknown": None, "others": {"of": []}}
    assert Quantization.read(config, "config.json").block_sizes
    with pytest.raises(CheckpointError, match="unknown=1, a field that is not read"):
        Quantization.read(config | {"unknown": 1}, "config.json")
