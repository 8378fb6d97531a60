"""The quantization_config of a Hugging Face folder, read through one table of known fields.

A field that nobody reads may change the numbers, as a rotation does. So the table names, for each
method, the fields that are read here and those that change no stored weight; all others are refused
by name, before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid.checkpoints.tensor_files import CheckpointError

QUANT_FILE = "hf_quant_config.json"

_FP8_BLOCK = (128, 128)
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
    """Columns that share a scale by AWQ and GPTQ; 0: all."""
    zeros_less_one: bool
    """Whether zero points are stored less 1."""

    @classmethod
    def read(cls, config: Mapping[str, Any], source: str) -> Quantization:
        """Read a quantization_config.

        Args:
            source: its name in errors.

        Raises:
            CheckpointError: a method or a field that is not read; names it.
        """
        method = str(config.get("quant_method")).lower()
        if method not in _METHODS:
            raise CheckpointError(
                f"{source} has a quantization_config of quant_method={config.get('quant_method')!r}"
                f"; {', '.join(_METHODS)} are read. {_REMEDY}"
            )
        if (found := _unread(config, _METHODS[method])) is not None:
            raise CheckpointError(
                f"{source} has a quantization_config of quant_method={method!r} with {found}. "
                f"{_REMEDY}"
            )
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if method == "auto-round":
            method, layout = _PACKINGS[str(config.get("packing_format", "auto_round")).lower()]
        size = config.get("group_size") or config.get("q_group_size") or 0
        sizes = [tuple(block) for block in [config.get("weight_block_size")] if block]
        sizes += [(1, size)] if size > 0 else []
        for group in (config.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            if structure := weights.get("block_structure"):
                sizes.append(tuple(structure))
            if (columns := weights.get("group_size") or 0) > 0:
                sizes.append((1, columns))
        return cls(
            method,
            tuple(sizes) or (_FP8_BLOCK,),
            max(size, 0),
            method == "gptq" and layout.lower() != "gptq_v2",
        )


def modelopt_config(folder: Path) -> dict[str, Any] | None:
    """What NVIDIA's ModelOpt says of a quantization in a file of its own; None: there is no file.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / QUANT_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    found = content.get("quantization") if isinstance(content, Mapping) else None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} says nothing of a quantization. Copy the folder again.")
    return {"quant_method": "modelopt", **found}


# The table ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Values:
    """The values of a field that are read; of strings, case does not count."""

    values: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        return any(_lower(value) == _lower(each) for each in self.values)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _any(value: Any) -> bool:
    return True


def _only(*values: Any) -> _Values:
    return _Values(values)


Rule = Callable[[Any], bool] | Mapping[str, Any]
"""Whether a value of a field is read; of an object, the rules of its fields ("*": of any field)."""


def _fields(names: str, rule: Rule = _any) -> dict[str, Rule]:
    """The same rule for several fields."""
    return dict.fromkeys(names.split(), rule)


def _unread(config: Mapping[str, Any], rules: Mapping[str, Rule], path: str = "") -> str | None:
    """Describe the first field that is not read; None: there is none."""
    for name, value in config.items():
        if _is_empty(value):
            continue
        rule = rules.get(name, rules.get("*"))
        if isinstance(rule, Mapping) and isinstance(value, Mapping):
            if (found := _unread(value, rule, f"{path}{name}.")) is not None:
                return found
        elif rule is None:
            return f"{path}{name}={_shown(value)}, a field that is not read"
        elif isinstance(rule, Mapping) or not rule(value):
            known = rule.values if isinstance(rule, _Values) else ()
            read = ", ".join(str(each) for each in known if each != "") or "other values"
            return f"{path}{name}={_shown(value)}; {read} are read"
    return None


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, or an object or list of nothing."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value is None or value == []


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_OFF = _only(False)
_SKIPPED = _fields("quant_method ignore ignored_layers exclude_modules modules_to_not_convert")
_COMPRESSED = _only(
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mixed-precision"),
)
_GROUP = {
    **_fields("targets input_activations output_activations"),
    **_fields("format", _COMPRESSED),
    "weights": {
        **_fields("num_bits", _only(4, 8)),
        **_fields("type", _only("int", "float")),
        **_fields("dynamic", _OFF),
        **_fields("actorder", _only(False, "weight", "static")),
        **_fields("group_size block_structure strategy symmetric scale_dtype zp_dtype"),
        **_fields("observer observer_kwargs"),
    },
}
"""Of `config_groups` of compressed-tensors."""
_MODELOPT = {
    **_fields(
        "quant_algo",
        _only(
            *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
            *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
        ),
    ),
    **_fields("group_size"),
    **_fields("has_zero_point pre_quant_scale", _OFF),
}
_OF_TURNED = {
    **_fields("bits w_bit", _only(4)),
    **_fields("group_size q_group_size sym zero_point lm_head"),
    **_fields("desc_act"),  # the tensors say whether columns have an order of their own
    **_fields("data_type", _only("int")),
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
    **_fields("pack_dtype", _only("int32")),
}
"""Of AWQ, GPTQ and AutoRound."""
_OF_MODULES = {**_OF_TURNED, **_fields("bits", lambda value: value == 4 or value >= 16)}
_OF_MODULES |= _fields("data_type", _only("int", "float", "fp"))
"""Of single modules of these: of 4 bits, or not packed."""
_PACKINGS = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round:gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", "gemm"),
    "auto_round:awq": ("awq", "gemm"),
}
"""`packing_format` of AutoRound -> the method and layout that have the same tensors."""

_METHODS: dict[str, dict[str, Rule]] = {
    "fp8": {
        **_SKIPPED,
        **_fields("weight_block_size activation_scheme modules_to_convert dequantize"),
        **_fields("fmt", _only("e4m3", "float8_e4m3fn")),
        **_fields("scale_fmt", _only("float", "ue8m0")),
        **_fields("expert_dtype", _only("fp8")),
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
        **_fields("quantization_status", _only("compressed")),
        **_fields("kv_cache_scheme global_compression_ratio version run_compressed"),
        "sparsity_config": _fields("format", _only("dense")),
        "config_groups": {"*": _GROUP},
    },
    "awq": {
        **_SKIPPED,
        **_OF_TURNED,
        **_fields("version format checkpoint_format", _only("gemm", "")),
        **_fields("method", _only("awq")),
        "dynamic": {"*": _OF_MODULES},
    },
    "gptq": {
        **_SKIPPED,
        **_OF_TURNED,
        **_fields("checkpoint_format format", _only("gptq", "gptq_v2", "")),
        **_fields("method", _only("gptq")),
        "dynamic": {"*": _OF_MODULES},
    },
    "auto-round": {
        **_SKIPPED,
        **_OF_TURNED,
        **_fields("packing_format", _only(*_PACKINGS)),
        "extra_config": {"*": {**_OF_MODULES, **_fields("in_blocks")}},
    },
}
"""By `quant_method`: the fields of a quantization_config, and which of their values are read."""
