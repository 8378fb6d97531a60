"""Gradients of the loss of whole models against transformers, parameter by parameter.

transformers runs in float64, so that what is compared is our error alone.
"""

import pytest
import torch
import torch.nn.functional as F
from huggingface import build, config_rows, in_float64, stored, twin_in_float64

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.huggingface import ADAPTERS
from megatron_hybrid.checkpoints.model_tensors import own_tensors


def gradients_of_theirs(model, tokens, labels, folder):
    """By the names of their files, which are not those of their modules: the model is saved with
    gradients in the place of its weights."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, position_ids=positions, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_() if parameter.grad is None else parameter.copy_(parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    model.save_pretrained(folder)
    return stored(folder)


def gradients_of_ours(model, tokens, labels, shapes):
    """By the names of files with tensors of these shapes, and in their layout, by the adapter."""
    model.train()(tokens, labels=labels).mean().backward()
    gradients = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in own_tensors(model).items()
    }
    adapter = ADAPTERS[model.config.huggingface_config["model_type"]]()
    found = {}
    for tensor_map in adapter.tensors(model.config):
        tensor_map = adapter.as_found(tensor_map, model.config, shapes)
        ours = [gradients[name] for name in tensor_map.ours]
        # A layout may add a constant, which no gradient has.
        constants = tensor_map.layout.to_theirs([torch.zeros_like(tensor) for tensor in ours])
        values = zip(tensor_map.layout.to_theirs(ours), constants, strict=True)
        found.update(zip(tensor_map.theirs, (value - c for value, c in values), strict=True))
    return found


@pytest.mark.parametrize("name", config_rows())
def test_gradients(name, tmp_path):
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "weights")
    model, _ = mh.load_pretrained(tmp_path / "weights")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, model.vocab_size, (2, 50), generator=generator)
    tokens, labels = rows[:, :-1], rows[:, 1:].contiguous()
    with in_float64():
        twin = twin_in_float64(theirs)
        expected = gradients_of_theirs(twin, tokens, labels, tmp_path / "gradients")
    shapes = {key: tuple(tensor.shape) for key, tensor in expected.items()}
    found = gradients_of_ours(model, tokens, labels, shapes)
    assert found.keys() == expected.keys()
    total = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    assert total.dtype == torch.float64 and total > 1e-2
    for key, value in expected.items():
        # Some are 0 but for rounding, such as those of the decays of states that forget at once.
        error, limit = (found[key] - value).norm(), 1e-5 * value.norm() + 3e-7 * total
        assert error <= limit, f"{key}: {error:.2g} of {value.norm():.2g}"
