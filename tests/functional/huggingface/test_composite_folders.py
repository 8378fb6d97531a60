"""The language model of a folder that holds a vision model too."""

import json

import pytest
import torch
import transformers
from huggingface import read_values, with_stacked_experts
from model_folders import rewrite
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import save_huggingface

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
}
COMPOSITES = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "gemma3": {"vision_config": {**TOWER, "vision_use_head": False}, "mm_tokens_per_image": 4},
    "gemma4": {"vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 8}},
    "step3p7": {"vision_config": {**TOWER, "num_channels": 3}},
    "llama4": {
        "vision_config": {
            **TOWER,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    },
}
DEEP = {"vision_config": {**QWEN["vision_config"], "deepstack_visual_indexes": [0]}}
IN_QWEN = {"qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen2_5_vl": "qwen2"}
"""Composites of Qwen -> the architecture that is written."""
COMPOSITES |= dict.fromkeys(IN_QWEN, DEEP)
OTHERS = {"lfm2_vl": "lfm2", "smolvlm": "llama", "llava": "llama", "kimi_k25": "deepseek_v3"}
"""Models whose language model alone is known, and the architecture of that."""

NAMES = {
    "language_model.model.blocks.": "model.language_model.layers.",  # Kimi's, by 5.24 alone
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
}
"""How transformers spells the tensors of some such models -> of others, and older -> newer."""

LLAMA4_WITHOUT_LOGITS = {"5.24.0"}
"""Releases of transformers whose whole Llama 4 fails on `image_outputs`, which its language model's
output lacks: the language model is asked instead. 5.23.0 hands its logits out."""


def rename(folder):
    """Spell the tensors the other way."""

    def spelled(name):
        found = (new + name.removeprefix(old) for old, new in NAMES.items() if name.startswith(old))
        return next(found, name)

    def renamed(tensors):
        other = {spelled(name): tensor for name, tensor in tensors.items()}
        assert other.keys() != tensors.keys()
        return other

    rewrite(folder, renamed)


def flatten(folder):
    """As Qwen2.5-VL is published: in names of before, and with one object for all."""
    config = folder / "config.json"
    values = json.loads(config.read_text())
    text = values.pop("text_config")
    rope = {"rope_theta": text.pop("rope_parameters")["rope_theta"]}
    rope["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    config.write_text(json.dumps({**text, **values, **rope}))

    def older(name):
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")

    rewrite(folder, lambda tensors: {older(name): tensor for name, tensor in tensors.items()})


def leave_out_ties(folder):
    """As LFM2.5-VL is published: whether embeddings are tied follows from the language model."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for part in (values, values["text_config"]):
        del part["tie_word_embeddings"]
    path.write_text(json.dumps(values))


def stack_experts(folder):
    """The experts of a layer in two tensors, as in the released folders."""
    more = {"mtp.norm.weight": torch.ones(48)}
    rewrite(folder, lambda tensors: with_stacked_experts(tensors) | more)


def save(theirs, folder):
    if theirs.config.model_type != "qwen3_vl_moe":
        theirs.save_pretrained(folder)
        return
    theirs.config.save_pretrained(folder)  # 5.24 fails to write such experts: rows are inputs
    tensors = theirs.state_dict().items()
    turned = {n: t.transpose(1, 2) if ".experts." in n else t for n, t in tensors}
    turned = {name: tensor.contiguous() for name, tensor in turned.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "values"),
    [
        *((name, None, {}) for name in COMPOSITES),
        ("gemma3", rename, {}),
        ("llama4", rename, {}),
        ("qwen3_5", None, {"tie_word_embeddings": True}),
        ("qwen3_5_moe", stack_experts, {}),
        ("lfm2_vl", leave_out_ties, {}),
        ("qwen2_5_vl", flatten, {}),
        *((name, rename if name == "kimi_k25" else None, {}) for name in OTHERS),
    ],
)
def test_language_model_inside_another(tmp_path, caplog, name, change, values):
    # As a part, transformers' Gemma 3 does not cap its logits; released ones have no cap.
    text = read_values({**OTHERS, **IN_QWEN, "step3p7": "step3p5"}.get(name, name))
    text |= {"final_logit_softcapping": None} if name == "gemma3" else {}
    if name == "qwen2_5_vl":
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 2, 2]}
    parts = COMPOSITES.get(name, {"vision_config": TOWER})
    config = AutoConfig.for_model(name, text_config=text, **parts, **values)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.08)
    save(theirs, tmp_path)
    if change is not None:
        change(tmp_path)
    model, _ = mh.load_pretrained(tmp_path)
    assert ("tensors of other parts are left out" in caplog.text) == (name in OTHERS)
    tokens = torch.randint(3, text["vocab_size"], (2, 50))
    with torch.no_grad():
        whole = name != "llama4" or transformers.__version__ not in LLAMA4_WITHOUT_LOGITS
        reference = theirs if whole else theirs.language_model
        expected = reference(tokens, use_cache=False).logits
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=0)

    save_huggingface(model, tmp_path / "text")
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert written["model_type"] == IN_QWEN.get(name, config.text_config.model_type)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    with torch.no_grad():
        logits = again.eval()(tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
