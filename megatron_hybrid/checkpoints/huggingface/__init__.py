"""Hugging Face architectures, one file a family: their config and tensors, here and back again.

See docs/guides/own_model.md.
"""

from __future__ import annotations

from megatron_hybrid.checkpoints.huggingface.base import Adapter
from megatron_hybrid.utils.registry import Registry, check_class

_OWN = {
    "bailing_hybrid": "bailing_hybrid:BailingHybrid",
    "bailing_moe_linear": "bailing_linear:BailingLinear",
    "bamba": "bamba:Bamba",
    "cohere2": "cohere2:Cohere2",
    "deepseek_v3": "deepseek_v3:DeepseekV3",
    "kimi_k2": "deepseek_v3:DeepseekV3",
    "falcon_h1": "falcon_h1:FalconH1",
    "gemma3_text": "gemma:Gemma3",
    "gemma2": "gemma:Gemma3",
    "gemma3": "gemma:Gemma3",
    "gemma3n_text": "gemma:Gemma3n",
    "gemma3n": "gemma:Gemma3n",
    "gemma4_text": "gemma:Gemma4",
    "gemma4": "gemma:Gemma4",
    "glm4": "glm4:Glm4",
    "glm4_moe": "glm4:Glm4Moe",
    "gpt_oss": "gpt_oss:GptOss",
    "granite": "granite:Granite",
    "granitemoe": "granite:GraniteMoe",
    "granitemoehybrid": "granitemoehybrid:GraniteMoeHybrid",
    "hunyuan_v1_dense": "hunyuan:Hunyuan",
    "hunyuan_v1_moe": "hunyuan:Hunyuan",
    "jamba": "jamba:Jamba",
    "kimi_linear": "kimi_linear:KimiLinear",
    "lfm2": "lfm2:Lfm2",
    "lfm2_moe": "lfm2:Lfm2Moe",
    "llama4_text": "llama4:Llama4",
    "llama4": "llama4:Llama4",
    "ernie4_5": "llama:Ernie",
    "ernie4_5_moe": "llama:ErnieMoe",
    "llama": "llama:Llama",
    "seed_oss": "llama:SeedOss",
    "smollm3": "llama:SmolLM3",
    "mamba": "mamba:Mamba",
    "falcon_mamba": "mamba:Mamba",
    "mamba2": "mamba:Mamba2",
    "mimo_v2_flash": "mimo:MiMoV2Flash",
    "minimax": "minimax:MiniMax",
    "minimax_m1": "minimax:MiniMax",
    "minimax_text_01": "minimax:MiniMax",
    "minimax_m2": "minimax_m2:MiniMaxM2",
    "ministral3": "mistral:Ministral3",
    "mistral": "mistral:Mistral",
    "mixtral": "mistral:Mixtral",
    "nemotron_h": "nemotron_h:NemotronH",
    "nemotron_h_puzzle": "nemotron_h:NemotronHPuzzle",
    "exaone4": "olmo:Exaone4",
    "olmo2": "olmo:Olmo2",
    "olmo3": "olmo:Olmo3",
    "olmo_hybrid": "olmo_hybrid:OlmoHybrid",
    "phi3": "phi3:Phi3",
    "qwen3_5_text": "qwen3_next:Qwen35",
    "qwen3_5": "qwen3_next:Qwen35",
    "qwen3_5_moe_text": "qwen3_next:Qwen35Moe",
    "qwen3_5_moe": "qwen3_next:Qwen35Moe",
    "qwen3_next": "qwen3_next:Qwen3Next",
    "mimo": "qwen:Qwen2",
    "qwen2": "qwen:Qwen2",
    "qwen2_5_vl_text": "qwen:Qwen2",
    "qwen2_5_vl": "qwen:Qwen2",
    "qwen2_moe": "qwen:Qwen2Moe",
    "qwen3": "qwen:Qwen3",
    "qwen3_vl_text": "qwen:Qwen3",
    "qwen3_vl": "qwen:Qwen3",
    "qwen3_moe": "qwen:Qwen3Moe",
    "qwen3_vl_moe_text": "qwen:Qwen3Moe",
    "qwen3_vl_moe": "qwen:Qwen3Moe",
    "recurrent_gemma": "recurrent_gemma:RecurrentGemma",
    "step3p5": "step3p5:Step3p5",
    "step3p7": "step3p5:Step3p5",
    "zamba": "zamba:Zamba",
    "zamba2": "zamba:Zamba2",
}
"""`model_type` of config.json -> file of this folder, and the adapter's class in it."""


def _check(model_type: str, adapter: type[Adapter]) -> None:
    what = f"the adapter of the model_type {model_type!r}"
    check_class(what, adapter, Adapter)
    if model_type not in (types := adapter.model_types + adapter.composite_types):
        raise ValueError(f"{what} is {adapter.__name__}, which reads {', '.join(types)} alone")


ADAPTERS: Registry[type[Adapter]] = Registry(
    "adapter",
    "megatron_hybrid.adapters",
    _check,
    {model_type: f"{__name__}.{where}" for model_type, where in _OWN.items()},
)
"""Every known `model_type` of Hugging Face, and the class of its adapter."""
