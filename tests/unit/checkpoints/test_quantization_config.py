"""A quantization_config is read through one table: what is not in it is refused by name."""

from collections.abc import Mapping

import pytest

from megatron_hybrid.checkpoints.quantization_config import METHODS, Quantization
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
AUTO, AWQ, FP8, MODELOPT = ({"quant_method": n} for n in ("auto-round", "awq", "fp8", "modelopt"))
WHOLE = ((128, 128),)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (COMPRESSED, ("compressed-tensors", ((1, 64),), 0, False, ((("Linear",), ""),))),
        (GPTQ, ("gptq", ((1, 32),), 32, True)),
        (
            GPTQ | {"dynamic": {"-:a": {}, "b": {"bits": 16, "group_size": 64}}},
            ("gptq", ((1, 32),), 32, True),
        ),
        (GPTQ | {"group_size": -1}, ("gptq", WHOLE, 0, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, ("gptq", ((1, 32),), 32, False)),
        (GPTQ | {"format": "gptq_v2", "method": "gptq"}, ("gptq", ((1, 32),), 32, False)),
        (AUTO | {"packing_format": "auto_round:auto_gptq", "bits": 4}, ("gptq", WHOLE, 0, True)),
        (
            AUTO | {"packing_format": "auto_round", "group_size": 64},
            ("gptq", ((1, 64),), 64, False),
        ),
        (AUTO, ("gptq", WHOLE, 0, True)),
        (AUTO | {"packing_format": None}, ("gptq", WHOLE, 0, True)),
        (AUTO | {"packing_format": "auto"}, ("gptq", WHOLE, 0, True)),
        (AUTO | {"packing_format": "auto_round:auto_awq"}, ("awq", WHOLE, 0, False)),
        (AWQ | {"version": "GEMM", "q_group_size": 16, "w_bit": 4}, ("awq", ((1, 16),), 16, False)),
        (MODELOPT | {"quant_algo": "fp8_pb_wo"}, ("modelopt", WHOLE, 0, False)),
        (FP8 | {"weight_block_size": [32, 16], "fmt": "e4m3"}, ("fp8", ((32, 16),), 0, False)),
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
        (COMPRESSED | {"transform_config": {"R1": {"type": "hadamard"}}}, "transform_config is"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format is"),
        (COMPRESSED | {"moe_sparsity_config": {"layers": [3]}}, "moe_sparsity_config is"),
        (COMPRESSED | {"format": "marlin-24"}, "format is 'marlin-24'; use 'float-quantized', "),
        (COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}}, r"config_groups.W4A16 is \["),
        (COMPRESSED | nested(actorder="group"), "config_groups.g.weights.actorder is 'group'"),
        (COMPRESSED | nested(num_bits=3), "config_groups.g.weights.num_bits is 3; use 4 or 8"),
        (COMPRESSED | nested(hadamard=True), "weights.hadamard is True, a field that is not read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "is 'marlin'; use 'gptq', 'gptq_v2'"),
        (GPTQ | {"rotation": "hadamard"}, "rotation is 'hadamard', a field that is not read"),
        (GPTQ | {"adapter": {"name": "lora"}}, "adapter is "),
        (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}, r"dynamic.\+:.\*up.\*.bits is 8"),
        (GPTQ | {"dynamic": {"a": {"group_size": 64}}}, "dynamic.a.group_size is 64; .* 32"),
        (AUTO | {"extra_config": {"a": {"group_size": 16}}}, "extra_config.a.group_size is 16"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16'; use 'int32'"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; use 'gemm'"),
        (AUTO | {"packing_format": "auto_round:fp8"}, "packing_format is "),
        (AUTO | {"rotation_config": {"size": 32}}, "rotation_config is "),
        (
            MODELOPT | {"quant_algo": "NVFP4", "pre_quant_scale": True},
            "pre_quant_scale is True; use False",
        ),
        (
            MODELOPT | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
            "quantized_layers.a.quant_algo is 'w4a8_awq'",
        ),
        (COMPRESSED | {"config_groups": {"g": {"targets": ["re:["]}}}, r"g.targets has 're:\['"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4'; use 'fp8'"),
        (FP8 | {"weight_scale_semantics": "inverse"}, "scale_semantics is"),
        ({"quant_method": "torchao", "quant_type": {}}, "quant_method='torchao'; fp8, "),
        ({"quant_method": None}, "quant_method=None"),
        (GPTQ | {"group_size": "32"}, "group_size is '32'; it must be a whole number from -1"),
        (GPTQ | {"dynamic": {"a": {"bits": "4"}}}, "dynamic.a.bits is '4'; it must be one of 4"),
        (COMPRESSED | {"config_groups": [1]}, r"config_groups is \[1\]; it must be a mapping"),
        (COMPRESSED | nested(block_structure="2:4"), "block_structure is '2:4'; it must be a list"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128"),
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
@pytest.mark.parametrize("method", METHODS)
def test_a_value_of_any_kind_is_read_or_refused_by_name(method, value):
    for *path, name in fields(METHODS[method]):
        config = {name: value}
        for outer in reversed(path):
            config = {outer: config}
        try:
            found = Quantization.read({"quant_method": method} | config, "config.json")
            assert found.announced(LAYER) <= {f"{LAYER}.g_idx", ZERO}
        except CheckpointError as error:
            assert f" {'.'.join((*path, name))}" in str(error) or name == "quant_method"


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


@pytest.mark.parametrize("method", METHODS)
def test_a_field_that_says_nothing_is_no_reason_to_refuse(method):
    config = {"quant_method": method, "unknown": None, "others": {"of": []}}
    assert Quantization.read(config, "config.json").block_sizes
    with pytest.raises(CheckpointError, match="unknown is 1, a field that is not read"):
        Quantization.read(config | {"unknown": 1}, "config.json")
