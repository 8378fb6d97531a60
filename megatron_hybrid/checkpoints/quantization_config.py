"""The quantization_config of a Hugging Face folder, read through one table of known fields.

A field that nobody reads may change the numbers, as a rotation does. So the table names, for each
method, the fields that are read here and those that change no stored weight; all others are refused
by name, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.utils.validation import Range, check_field, shown

QUANT_FILE = "hf_quant_config.json"

_FP8_BLOCK = (128, 128)
_CLASS = ("Linear",)
"""Targets of groups that name none."""
_REMEDY = (
    "Load it with the library that packed it, dequantize, and save it again; or quantize the "
    "unquantized model in a format of docs/guides/quantized_weights.md."
)


@dataclass(frozen=True)
class Quantization:
    """What of a quantization_config the reading of weights needs."""

    method: str
    """A key of the table; of AutoRound's folders the method whose tensors they have."""
    block_sizes: tuple[tuple[int, int], ...]
    """Rows and columns that may share a scale."""
    group_size: int
    """Columns that share a scale by AWQ and GPTQ; 0 means all."""
    zeros_less_one: bool
    """Whether zero points are stored less 1."""
    endings: tuple[tuple[tuple[str, ...], str], ...] = ()
    """Targets of each group of layers, and the ending of a tensor that each of them has ("": none).
    """

    @classmethod
    def read(cls, config: Mapping[str, Any], source: str) -> Quantization:
        """Read a quantization_config.

        Args:
            source: its name in errors.

        Raises:
            CheckpointError: a method or a field that is not read; names it.
        """
        method = str(config.get("quant_method")).lower()
        if method not in METHODS:
            raise CheckpointError(
                f"{source} has a quantization_config of quant_method={config.get('quant_method')!r}"
                f"; {', '.join(METHODS)} are read. {_REMEDY}"
            )
        try:
            said = _read(config, METHODS[method])
            size = said.get("group_size") or said.get("q_group_size") or 0
            _check_groups(said, size)
        except ValueError as error:
            raise CheckpointError(
                f"{source} has a quantization_config of quant_method={method!r} that is not read: "
                f"{error} {_REMEDY}"
            ) from None
        layout = said.get("checkpoint_format") or said.get("format") or "gptq"
        if method == "auto-round":
            method, layout = _PACKINGS[said.get("packing_format", "auto").lower()]
        sizes = [tuple(said["weight_block_size"])] if "weight_block_size" in said else []
        sizes += [(1, size)] if size > 0 else []
        endings = [(_CLASS, ".g_idx")] if method == "gptq" and said.get("desc_act") else []
        for group in said.get("config_groups", {}).values():
            if (weights := group.get("weights")) is None:
                continue  # of activations alone
            if "block_structure" in weights:
                sizes.append(tuple(weights["block_structure"]))
            if (columns := weights.get("group_size", 0)) > 0:
                sizes.append((1, columns))
            ending = "" if weights.get("symmetric", True) else ".weight_zero_point"
            endings.append((tuple(group.get("targets", _CLASS)), ending))
        return cls(
            method,
            tuple(sizes) or (_FP8_BLOCK,),
            max(size, 0),
            method == "gptq" and layout.lower() != "gptq_v2",
            tuple(endings),
        )

    def announced(self, layer: str) -> set[str]:
        """Name the tensors that a packed layer must have in addition to its codes and scales."""

        def is_named(target: str) -> bool:
            return bool(re.match(target[3:], layer)) if target[:3] == "re:" else target == layer

        # Groups that name the layer come before those of its class, such as Linear.
        for is_meant in (is_named, lambda target: target[:1].isupper()):
            endings = {ending for targets, ending in self.endings if any(map(is_meant, targets))}
            if endings:
                return {layer + ending for ending in endings if "" not in endings}
        return set()


# The table ---------------------------------------------------------------------------------------


_Rules = Mapping[str, Any]
"""For the fields of an object ("*": for any field), the annotation of the values that are read, or
the rules of an object in it. Case of texts does not count: here they are in lower case."""
_UNUSED = object()
"""In place of rules of fields that change no stored weight: nothing here sees their values."""
_FLAG = Literal[False, True]
_GROUP_SIZE = Annotated[int, Range(ge=-1)]
_BLOCK = Annotated[list[Annotated[int, Range(ge=1)]], Range(ge=2, le=2)]
_BITS = Literal[4] | Annotated[int, Range(ge=16)]


def _fields(names: str, rule: Any = _UNUSED) -> dict[str, Any]:
    """Give several fields the same rule."""
    return dict.fromkeys(names.split(), rule)


def _read(config: Mapping[str, Any], rules: _Rules, path: str = "") -> dict[str, Any]:
    """Return the fields that something here uses, of those that say anything. Raise ValueError for
    the first value that is not read, by its name."""
    found = {}
    for name, value in config.items():
        if _is_empty(value):
            continue
        rule = rules.get(name, rules.get("*"))
        if rule is None:
            raise ValueError(f"{path}{name} is {shown(value)}, a field that is not read.")
        if isinstance(rule, Mapping) and isinstance(value, Mapping):
            found[name] = _read(value, rule, f"{path}{name}.")
        elif rule is not _UNUSED:
            lower = value.lower() if isinstance(value, str) else value
            check_field(path + name, lower, Mapping if isinstance(rule, Mapping) else rule)
            found[name] = value
    return found


def _check_groups(said: Mapping[str, Any], size: int) -> None:
    """Raise ValueError for targets that are no regular expressions, or a packed module whose groups
    have another size than those of all."""
    for name, group in said.get("config_groups", {}).items():
        for target in group.get("targets", ()):
            try:
                re.compile(target[3:] if target[:3] == "re:" else "")
            except re.error as error:
                raise ValueError(f"config_groups.{name}.targets has {target!r}: {error}.") from None
    for field in ("dynamic", "extra_config"):
        for name, module in said.get(field, {}).items():
            own = module.get("group_size", size)
            if own != size and module.get("bits", 4) == 4:
                raise ValueError(f"{field}.{name}.group_size is {own}; use that of all, {size}.")


def _is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, or an object or list of nothing."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or value == []


_OFF = Literal[False]
_SKIPPED = _fields("quant_method ignore ignored_layers exclude_modules modules_to_not_convert")
_COMPRESSED = Literal[
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mixed-precision"),
]
_GROUP = {
    **_fields("input_activations output_activations"),
    **_fields("targets", list[str]),
    **_fields("format", _COMPRESSED),
    "weights": {
        **_fields("num_bits", Literal[4, 8]),
        **_fields("type", Literal["int", "float"]),
        **_fields("dynamic", _OFF),
        **_fields("actorder", Literal[False, "weight", "static"]),
        **_fields("group_size", _GROUP_SIZE),
        **_fields("block_structure", _BLOCK),
        **_fields("symmetric", _FLAG),
        **_fields("strategy scale_dtype zp_dtype observer observer_kwargs"),
    },
}
"""Rules of an entry of `config_groups` of compressed-tensors."""
_MODELOPT = {
    **_fields(
        "quant_algo",
        Literal[
            *("fp8", "fp8_per_channel_per_token", "fp8_pb_wo"),
            *("nvfp4", "w4a16_nvfp4", "mixed_precision"),
        ],
    ),
    **_fields("group_size", _GROUP_SIZE),
    **_fields("has_zero_point pre_quant_scale", _OFF),
}
_OF_TURNED = {
    **_fields("bits w_bit", Literal[4]),
    **_fields("group_size q_group_size", _GROUP_SIZE),
    **_fields("sym zero_point lm_head"),
    **_fields("desc_act", _FLAG),  # the tensors say whether columns have an order of their own
    **_fields("data_type", Literal["int"]),
    **_fields("super_bits super_group_size", _OFF),
    # How the numbers were found, and what computes with them elsewhere.
    **_fields(
        "act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym amp "
        "autoround_version backend batch_size block_name_to_quantize cache_block_outputs "
        "damp_auto_increment damp_percent dataset disable_exllama enable_alg_ext "
        "enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input exllama_config "
        "fuse_max_seq_len gradient_accumulate_steps inside_layer_modules iters low_gpu_mem_usage "
        "lr max_input_length meta minmax_lr model_file_base_name model_name_or_path model_seqlen "
        "module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse "
        "nsamples pad_token_id provider quant_block_list quant_lm_head regex_config scale_dtype "
        "seqlen static_attention_dtype static_attention_granularity static_groups static_kv_dtype "
        "static_kv_granularity supported_types to_quant_block_names tokenizer true_sequential "
        "use_cuda_fp16 use_exllama"
    ),
    **_fields("do_fuse is_marlin_format", _OFF),
    **_fields("pack_dtype", Literal["int32"]),
}
"""Rules that AWQ, GPTQ and AutoRound share."""
_OF_MODULES = {**_OF_TURNED, **_fields("bits", _BITS)}
_OF_MODULES |= _fields("data_type", Literal["int", "float", "fp"])
"""Rules of single modules of these: 4 bits, or not packed."""
_PACKINGS = {
    "auto": ("gptq", "gptq"),
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round:gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
    "auto_round:awq": ("awq", "gemm"),
}
"""`packing_format` of AutoRound -> the method and layout that have the same tensors."""

METHODS: dict[str, _Rules] = {
    "fp8": {
        **_SKIPPED,
        **_fields("weight_block_size", _BLOCK),
        **_fields("activation_scheme modules_to_convert dequantize"),
        **_fields("fmt", Literal["e4m3", "float8_e4m3fn"]),
        **_fields("scale_fmt", Literal["float", "ue8m0"]),
        **_fields("expert_dtype", Literal["fp8"]),
    },
    "mxfp4": {**_SKIPPED, **_fields("dequantize")},
    "modelopt": {
        **_SKIPPED,
        **_MODELOPT,
        **_fields("kv_cache_quant_algo kv_cache_scheme producer"),
        "quantized_layers": {"*": _MODELOPT},
        "config_groups": {"*": {**_GROUP, **_MODELOPT}},
    },
    "compressed-tensors": {
        **_SKIPPED,
        **_fields("format", _COMPRESSED),
        **_fields(
            "quantization_status",  # a stage of the work
            Literal["initialized", "calibration", "frozen", "compressed"],
        ),
        **_fields("kv_cache_scheme global_compression_ratio version run_compressed"),
        "sparsity_config": {**_fields("format", Literal["dense"]), "*": _UNUSED},
        "config_groups": {"*": _GROUP},
    },
    "awq": {
        **_SKIPPED,
        **_OF_TURNED,
        **_fields("version format checkpoint_format", Literal["gemm", ""]),
        **_fields("method", Literal["awq"]),
        "dynamic": {"*": _OF_MODULES},
    },
    "gptq": {
        **_SKIPPED,
        **_OF_TURNED,
        **_fields("checkpoint_format format", Literal["gptq", "gptq_v2", ""]),
        **_fields("method", Literal["gptq"]),
        "dynamic": {"*": _OF_MODULES},
    },
    "auto-round": {
        **_SKIPPED,
        **_OF_TURNED,
        **_fields("packing_format", Literal[tuple(_PACKINGS)]),
        "extra_config": {"*": {**_OF_MODULES, **_fields("in_blocks")}},
    },
}
"""Fields of a quantization_config, and the values that are read, by `quant_method`."""
