"""What differs too little to show in the logits of random weights, against transformers."""

import pytest
import torch
from huggingface import Reference, build
from model_folders import rewrite
from transformers import AutoModelForCausalLM

import megatron_hybrid as mh


def test_epsilon_of_lfm2s_router(tmp_path):
    """It shows where the chosen experts have scores of its own size."""
    theirs = build("lfm2_moe")
    with torch.no_grad():
        for name, tensor in theirs.state_dict(keep_vars=True).items():
            if name.endswith("feed_forward.gate.weight"):
                tensor.copy_(3.0 * torch.randn(1, tensor.shape[1]).expand_as(tensor))
    theirs.save_pretrained(tmp_path)
    model, _ = mh.load_pretrained(tmp_path)
    tokens = torch.randint(3, 100, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        for layer in model.decoder.layers:
            layer.config.moe_router_topk_epsilon = 1e-20
        without = model(tokens)
    expected = Reference(theirs).logits(tokens)
    assert (without - expected).abs().max() > 1e-3
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {"rope_scaling": YARN}),  # beside the rope_parameters that transformers wrote
        ("llama", {"rope_scaling": LLAMA3}),
        ("qwen3_next", {"rope_scaling": YARN}),
        ("lfm2", {"rope_scaling": YARN}),
        ("gemma3", {"rope_scaling": YARN}),
        ("gpt_oss", {"rope_parameters": None, "rope_theta": 2000.0}),
        ("gpt_oss", {"rope_parameters": {}}),
    ],
)
def test_rotary_fields_that_somebody_added(name, values, tmp_path):
    """To a config.json: what transformers makes of it, and of the same weights, is what we do."""
    build(name).save_pretrained(tmp_path)
    rewrite(tmp_path, **values)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model, _ = mh.load_pretrained(tmp_path)
    tokens = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(0))
    expected = Reference(theirs).logits(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, atol=5e-5, rtol=0)
    before = Reference(build(name)).logits(tokens)
    assert (expected - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4"])
def test_gemmas_embedding_in_bfloat16(name, tmp_path):
    """Its factor is rounded to the dtype of the model; the sums of a layer are not compared."""
    theirs = build(name).bfloat16()
    theirs.save_pretrained(tmp_path)
    model, _ = mh.load_pretrained(tmp_path)
    assert model.config.params_dtype == torch.bfloat16
    seen = []

    def keep(module, arguments):
        seen.append(arguments[0].flatten(0, -2))

    theirs.model.layers[0].register_forward_pre_hook(keep)
    model.decoder.layers[0].register_forward_pre_hook(keep)
    tokens = torch.arange(40).view(1, 40)
    with torch.no_grad():
        theirs(tokens)
        model(tokens)
    expected, ours = seen
    assert torch.equal(ours, expected)
    factor = model.config.embedding_multiplier
    assert torch.tensor(factor, dtype=torch.bfloat16).item() != factor
