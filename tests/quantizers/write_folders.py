"""Folders that packages of quantization write of tiny models, and the logits that they stand for.

`python write_folders.py PACKAGE FOLDER ROW` writes, for each row of `ROWS` with the row's model,
`FOLDER/row/model` and `FOLDER/row/logits.safetensors`: what the package's own weights, dequantized
by the package, answer in fp32. A row that fails leaves `FOLDER/row/error.txt`. Each model has a
process of its own: some packages patch transformers.
"""

import copy
import importlib.metadata
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SIZES = {"hidden_size": 64, "intermediate_size": 128}
MORE_SIZES = {
    "granitemoehybrid": {"mamba_n_heads": 8, "shared_intermediate_size": 64},
    "llama:64": {"head_dim": 32},  # all rows in blocks of 64, which GPTQModel's AWQ asks for
    "llama4": {"intermediate_size_mlp": 64},
    "qwen3_next": {
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
TOKENS = torch.arange(3, 43)[None]
GROUP = 32

ROWS: dict[str, dict[str, tuple]] = {
    "llmcompressor": {
        "w4a16": ("llama", {"num_bits": 4}),
        "w4a16-asymmetric": ("llama", {"num_bits": 4, "symmetric": False}),
        "w8a16-asymmetric": ("llama", {"num_bits": 8, "symmetric": False}),
        "nvfp4a16": ("llama", "NVFP4A16"),
        "fp8-dynamic": ("llama", "FP8_DYNAMIC"),
        "fp8-block": ("llama", "FP8_BLOCK"),
        **{
            f"w4a16-{name}": (name, {"num_bits": 4})
            for name in ("qwen3_next", "minimax_m2", "gpt_oss", "llama4", "granitemoehybrid")
        },
    },
    "gptqmodel": {
        "gptq": ("llama", "gptq", True),
        "gptq-asymmetric": ("llama", "gptq", False),
        "gptq_v2-asymmetric": ("llama", "gptq_v2", False),
        "awq": ("llama:64", "gemm", False),
        **{
            f"gptq-{name}": (name, "gptq", True)
            for name in ("minimax_m2", "gpt_oss", "llama4", "granitemoehybrid")
        },
    },
    "modelopt": {
        "fp8": ("llama", "FP8_DEFAULT_CFG"),
        "fp8-block": ("llama", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
        "fp8-channel": ("llama", "FP8_PER_CHANNEL_PER_TOKEN_CFG"),
        "nvfp4": ("llama", "NVFP4"),
        **{
            f"fp8-{name}": (name, "FP8_DEFAULT_CFG")
            for name in ("minimax_m2", "gpt_oss", "llama4", "granitemoehybrid")
        },
    },
    "auto_round": {
        "auto_round": ("llama", "auto_round", True),
        "auto_round-asymmetric": ("llama", "auto_round", False),
        "auto_gptq": ("llama", "auto_gptq", True),
        "auto_awq": ("llama", "auto_awq", False),
        "auto_round-auto_awq": ("llama", "auto_round:auto_awq", False),
    },
    "torchao": {"int8": ("llama",)},
    "awq": {"gemm": ("llama",)},
}
"""By module of a package and row: the tiny model, and what the function below takes."""


def source_of(name: str, folder: Path) -> Path:
    """A tiny model in bf16 with a tokenizer, saved by transformers."""
    from huggingface import build  # which the test alone has on its path for this script

    model = build(name.partition(":")[0], **SIZES, **MORE_SIZES.get(name, {}))
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0"
    ).save_pretrained(folder)
    return folder


def loaded(source: Path) -> PreTrainedModel:
    """The tiny model."""
    return AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def answer(model: nn.Module) -> Tensor:
    """Logits in fp32."""
    return model.float()(TOKENS, use_cache=False).logits[0].contiguous()


def dequantized(model: nn.Module, weight_of: Callable[[nn.Module], Tensor | None]) -> nn.Module:
    """A model with plain layers in place of those that have such a weight [out, in]."""
    for name, module in list(model.named_modules()):
        if (weight := weight_of(module)) is None:
            continue
        bias = getattr(module, "bias", None)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        linear.weight.data = weight.detach().float().clone()
        if bias is not None:
            linear.bias.data = bias.detach().float().clone()
        model.set_submodule(name, linear)
    return model


def write_llmcompressor(source: Path, out: Path, scheme: str | dict) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = loaded(source)
    model.config.text_config = model.config  # the package looks for Llama 4's there
    linearize_moe(model)
    del model.config.text_config
    for module in model.modules():
        if isinstance(module, LinearExperts2D) and hasattr(model.config, "swiglu_limit"):
            module.limit = model.config.swiglu_limit  # the package takes 7.0, whatever that says
    options = {"targets": "Linear", "scheme": scheme}
    if isinstance(scheme, dict):
        weights = QuantizationArgs(type="int", strategy="group", group_size=GROUP, **scheme)
        group = QuantizationScheme(targets=["Linear"], weights=weights)
        options = {"config_groups": {"group_0": group}}
    ignore = ["lm_head", r"re:.*(router.*|gate|in_proj_(a|b|ba))$"]
    oneshot(model=model, recipe=[QuantizationModifier(ignore=ignore, **options)])
    plain = copy.deepcopy(model)
    model.save_pretrained(out, save_compressed=True)

    def weight_of(module: nn.Module) -> Tensor | None:
        """The weight as it is compressed, decompressed with scales in fp32."""
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            return None
        kind = scheme.format or infer_module_format(type(module), scheme)
        if "nvfp4" in str(getattr(kind, "value", kind)):
            return None  # decompressed in bf16; the layer itself computes in fp32
        packer = BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
        parts = packer.compress(dict(module.state_dict()), scheme)
        wide = {
            name: part.float() if part.dtype == torch.bfloat16 else part
            for name, part in parts.items()
        }
        return packer.decompress(wide, scheme)["weight"].float()

    return answer(dequantized(plain, weight_of))


def write_gptqmodel(source: Path, out: Path, kind: str, symmetric: bool) -> Tensor:
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # on two cores it chooses 1, and asks for 2
    import torch._dynamo
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear import AWQuantLinear
    from gptqmodel.quantization import METHOD, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    torch._dynamo.config.disable = True  # it compiles its unpacking in C++, for minutes
    options = {"method": METHOD.AWQ} if kind == "gemm" else {}
    config = QuantizeConfig(
        bits=4,
        group_size=GROUP,
        sym=symmetric,
        desc_act=False,
        format=kind,
        pack_impl="original",  # the others compile
        **options,
    )
    model = GPTQModel.load(str(source), config, device="cpu", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, 90, (32, 64), generator=generator)
    samples = [{"input_ids": row.tolist(), "attention_mask": [1] * 64} for row in rows]
    model.quantize(samples, batch_size=4)
    model.save(str(out))
    again = GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)

    def weight_of(module: nn.Module) -> Tensor | None:
        if isinstance(module, AWQuantLinear):
            parts = module.qweight, module.qzeros, module.scales, 4, GROUP
            return dequantize_gemm(*parts).t()
        found = getattr(module, "dequantize_weight", None)
        return None if found is None else found().t()

    # The package loads in 16 bits alone: scales as they are stored, but dequantized in fp32.
    return answer(dequantized(again.model.float(), weight_of))


def write_modelopt(source: Path, out: Path, name: str) -> Tensor:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor

    model = loaded(source)
    if name == "NVFP4":
        return write_nvfp4(model, out)
    model = mtq.quantize(model, getattr(mtq, name), lambda each: each(TOKENS, use_cache=False))
    export_hf_checkpoint(model, export_dir=out)
    mtq.disable_quantizer(model, "*")

    def weight_of(module: nn.Module) -> Tensor | None:
        codes = getattr(module, "weight", None)
        if codes is None or codes.dtype != torch.float8_e4m3fn:
            return None
        scale = module.weight_scale.float()
        if scale.dim() < 2:
            return codes.float() * scale.reshape(-1, 1)
        blocks, kept = {-2: 128, -1: 128}, FP8QTensor(codes.shape, torch.float32, codes)
        scale = scale.reshape(-(-codes.shape[0] // 128), -(-codes.shape[1] // 128))
        return kept.dequantize(torch.float32, scale=scale, block_sizes=blocks)

    state = dequantized(model, weight_of).state_dict()
    plain = loaded(source).float()
    for name, value in plain.state_dict().items():
        experts, _, projection = name.rpartition(".experts.")
        own = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        if f"{experts}.experts.0.down_proj.weight" in state and projection in own:
            for i, expert in enumerate(value):
                names = (f"{experts}.experts.{i}.{each}.weight" for each in own[projection])
                expert.copy_(torch.cat([state[each] for each in names]))
        elif name in state:
            value.copy_(state[name])
    return answer(plain)


def write_nvfp4(model: PreTrainedModel, out: Path) -> Tensor:
    """ModelOpt quantizes in NVFP4 on GPUs alone; its tensor type packs and unpacks on a CPU."""
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors = model.state_dict()
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            packed, scale, outer = NVFP4QTensor.quantize(linear.weight.data, 16)
            tensors[f"{name}.weight"] = packed._quantized_data
            tensors |= {f"{name}.weight_scale": scale, f"{name}.weight_scale_2": outer}
            tensors[f"{name}.input_scale"] = torch.tensor(0.5)
            linear.float().weight.data = packed.dequantize(
                dtype=torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16}
            )
    model.config.quantization_config = convert_hf_quant_config_format(
        {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "kv_cache_quant_algo": None,
                "exclude_modules": ["lm_head"],
            },
        }
    )
    model.config.save_pretrained(out)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors")
    return answer(model)


def write_auto_round(source: Path, out: Path, kind: str, symmetric: bool) -> Tensor:
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    rounding = AutoRound(
        loaded(source),
        AutoTokenizer.from_pretrained(source),
        bits=4,
        group_size=GROUP,
        sym=symmetric,
        iters=0,
        disable_opt_rtn=True,
        amp=False,  # else the weights that are compared are bfloat16 on a CPU that has it
    )
    model, _ = rounding.quantize()
    logits = answer(copy.deepcopy(model))
    rounding.save_quantized(str(out), format=kind, inplace=False)
    return logits


def write_torchao(source: Path, out: Path) -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=config
    )
    logits = model(TOKENS).logits[0].float().detach()
    model.save_pretrained(out)
    return logits


def write_awq(source: Path, out: Path) -> Tensor:
    """AutoAWQ does not run on transformers 5; its layer packs, and its function unpacks."""
    package = types.ModuleType("awq")
    package.__path__ = [str(Path(importlib.metadata.distribution("autoawq").locate_file("awq")))]
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    model = loaded(source)
    for parameter in model.parameters():
        parameter.data = parameter.data.half()  # and not the buffers, such as rotary frequencies
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            groups = linear.weight.data.float().unflatten(1, (-1, GROUP))
            low, high = groups.amin(-1), groups.amax(-1)
            scales = ((high - low).clamp(min=1e-5) / 15).half()
            zeros = (-low / scales.float()).round().clamp(0, 15)
            over = (each.repeat_interleave(GROUP, 1) for each in (scales.float(), zeros))
            scale, zero = over
            codes = (linear.weight.data.float() / scale + zero).round().clamp(0, 15)
            linear.weight.data = ((codes - zero) * scale).to(torch.float16)
            packed = WQLinear_GEMM.from_linear(
                linear, 4, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
            )
            model.set_submodule(name, packed)
    model.config.quantization_config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    model.save_pretrained(out)

    def weight_of(module: nn.Module) -> Tensor | None:
        if not isinstance(module, WQLinear_GEMM):
            return None
        parts = module.qweight, module.qzeros, module.scales.float(), 4, GROUP
        return dequantize_gemm(*parts).t()

    return answer(dequantized(model, weight_of))


DISTRIBUTIONS = {"modelopt": "nvidia-modelopt", "awq": "autoawq"}
"""Names on PyPI that differ from the module's."""


def main(package: str, folder: Path, first: str) -> None:
    """Write the rows of a package that have the model of `first`."""
    version = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    write = globals()[f"write_{package}"]
    folder.mkdir(exist_ok=True)
    (folder / "version.json").write_text(json.dumps(f"{package} {version}"))
    for row, (name, *arguments) in ROWS[package].items():
        if name != ROWS[package][first][0]:
            continue
        place = folder / row
        place.mkdir()
        try:
            logits = write(source_of(name, place / "source"), place / "model", *arguments)
            save_file({"logits": logits.contiguous()}, place / "logits.safetensors")
            print(f"{package} {row}: written", flush=True)
        except Exception:
            (place / "error.txt").write_text(traceback.format_exc())
            print(f"{package} {row}: {traceback.format_exc(limit=-3)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
