"""Hugging Face architectures, one file a family: their config and tensors, here and back again.

See docs/guides/own_model.md.
"""

from megatron_hybrid.checkpoints.huggingface.base import Adapter
from megatron_hybrid.utils.registry import Registry, check_class

_OWN = {
    "bailing:BailingHybrid": "bailing_hybrid",
    "bailing:BailingLinear": "bailing_moe_linear",
    "cohere2:Cohere2": "cohere2",
    "deepseek_v3:DeepseekV3": "deepseek_v3 kimi_k2",
    "deepseek_v3:KimiLinear": "kimi_linear",
    "gemma:Gemma3": "gemma2 gemma3 gemma3_text",
    "gemma:Gemma3n": "gemma3n gemma3n_text",
    "gemma:Gemma4": "gemma4 gemma4_text",
    "gemma:RecurrentGemma": "recurrent_gemma",
    "glm4:Glm4": "glm4",
    "glm4:Glm4Moe": "glm4_moe",
    "gpt_oss:GptOss": "gpt_oss",
    "granite:Granite": "granite",
    "granite:GraniteMoe": "granitemoe",
    "granite:GraniteMoeHybrid": "granitemoehybrid",
    "hunyuan:Hunyuan": "hunyuan_v1_dense hunyuan_v1_moe",
    "lfm2:Lfm2": "lfm2",
    "lfm2:Lfm2Moe": "lfm2_moe",
    "llama:Llama4": "llama4 llama4_text",
    "llama:Ernie": "ernie4_5",
    "llama:ErnieMoe": "ernie4_5_moe",
    "llama:Llama": "llama",
    "llama:SeedOss": "seed_oss",
    "llama:SmolLM3": "smollm3",
    "mamba:Bamba": "bamba",
    "mamba:FalconH1": "falcon_h1",
    "mamba:Jamba": "jamba",
    "mamba:Mamba": "falcon_mamba mamba",
    "mamba:Mamba2": "mamba2",
    "mimo:MiMoV2Flash": "mimo_v2_flash",
    "minimax:MiniMax": "minimax minimax_m1 minimax_text_01",
    "minimax:MiniMaxM2": "minimax_m2",
    "mistral:Ministral3": "ministral3",
    "mistral:Mistral": "mistral",
    "mistral:Mixtral": "mixtral",
    "nemotron_h:NemotronH": "nemotron_h",
    "nemotron_h:NemotronHPuzzle": "nemotron_h_puzzle",
    "olmo:Exaone4": "exaone4",
    "olmo:Olmo2": "olmo2",
    "olmo:Olmo3": "olmo3",
    "olmo:OlmoHybrid": "olmo_hybrid",
    "phi3:Phi3": "phi3",
    "phi4flash:Phi4Flash": "phi4flash",
    "qwen:Qwen2": "mimo qwen2 qwen2_5_vl qwen2_5_vl_text",
    "qwen:Qwen2Moe": "qwen2_moe",
    "qwen:Qwen3": "qwen3 qwen3_vl qwen3_vl_text",
    "qwen:Qwen35": "qwen3_5 qwen3_5_text",
    "qwen:Qwen35Moe": "qwen3_5_moe qwen3_5_moe_text",
    "qwen:Qwen3Moe": "qwen3_moe qwen3_vl_moe qwen3_vl_moe_text",
    "qwen:Qwen3Next": "qwen3_next",
    "step3:Step3": "step3_text step3_vl",
    "step3p5:Step3p5": "step3p5 step3p7",
    "zamba:Zamba": "zamba",
    "zamba:Zamba2": "zamba2",
}
"""File of this folder, and an adapter's class in it -> the `model_type`s that it reads."""


def _check(model_type: str, adapter: type[Adapter]) -> None:
    what = f"the adapter of the model_type {model_type!r}"
    check_class(what, adapter, Adapter)
    if model_type not in (types := adapter.model_types + adapter.composite_types):
        raise ValueError(f"{what} is {adapter.__name__}, which reads {', '.join(types)} alone")


ADAPTERS: Registry[type[Adapter]] = Registry(
    "adapter",
    "megatron_hybrid.adapters",
    _check,
    {kind: f"{__name__}.{where}" for where, kinds in _OWN.items() for kind in kinds.split()},
)
"""Every known `model_type` of Hugging Face, and the class of its adapter."""
