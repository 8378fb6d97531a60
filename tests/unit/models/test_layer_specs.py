"""The two layer specs: which is taken, and that they are one model under two spellings."""

import inspect

import pytest
import torch
import transformer_engine_stub
from reference import tiny_model
from safetensors.torch import load_file
from small_models import ONE_OF_EACH, random_tokens, small_config, small_model
from state_dicts import load_state

from megatron_hybrid import compat
from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models.layer_pattern import LAYER_KINDS, LayerKind
from megatron_hybrid.models.layer_specs import get_mixer, resolve_layer_spec
from megatron_hybrid.models.mixers.base import Mixer


@pytest.fixture
def transformer_engine(monkeypatch):
    """A stand-in for Transformer Engine, with its parameter names."""
    transformer_engine_stub.install(monkeypatch)


def test_without_transformer_engine_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(compat, "have_transformer_engine", lambda: False)
    with pytest.raises(ImportError, match=r"needs NVIDIA's.* layer_spec='local'"):
        small_model(layer_spec="transformer_engine")


@pytest.mark.parametrize(
    ("layer_spec", "have_te", "device", "expected"),
    [
        ("auto", True, "cuda", "transformer_engine"),
        ("auto", True, "cpu", "local"),
        ("auto", False, "cuda", "local"),
        ("local", True, "cuda", "local"),
        ("transformer_engine", True, "cpu", "transformer_engine"),
    ],
)
def test_auto(monkeypatch, layer_spec, have_te, device, expected):
    monkeypatch.setattr(compat, "have_transformer_engine", lambda: have_te)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(device))
    assert resolve_layer_spec(small_config(layer_spec=layer_spec)) == expected


@pytest.mark.parametrize("stub", transformer_engine_stub.STUBS, ids=lambda stub: stub.__name__)
def test_the_stubs_take_the_arguments_of_cores_classes(stub):
    taken = set(inspect.signature(stub).parameters) - {"of_this_release"}
    assert taken <= transformer_engine_stub.arguments_in_core(stub.__name__)


@torch.no_grad()
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_plain_state_dict_goes_from_fused_to_local(transformer_engine, normalization):
    fields = {"qk_layernorm": True, "normalization": normalization}
    local, fused = (
        small_model(layer_spec=spec, **fields) for spec in ("local", "transformer_engine")
    )
    for parameter in fused.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    state = {k: v for k, v in fused.state_dict().items() if isinstance(v, torch.Tensor)}
    local.load_state_dict(state, strict=True)
    tokens = random_tokens(2, 20)
    torch.testing.assert_close(local(tokens), fused(tokens))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("pattern", ONE_OF_EACH)
def test_every_layer_kind_is_one_model_under_both_specs(
    transformer_engine, pattern, zero_centered, tmp_path
):
    """The same logits, and the same tensors under the same names after a way there and back."""
    fields = {
        "vocab_size": 61,
        "layernorm_zero_centered_gamma": zero_centered,
        "add_bias_linear": zero_centered and pattern not in "ZV",
        "qk_layernorm": zero_centered,
    }
    local = tiny_model.__wrapped__(pattern * 2, layer_spec="local", **fields)
    given = {name: torch.randn_like(x) * 0.2 for name, x in full_state_dict(local).items()}
    load_state(local, given)
    fused = tiny_model.__wrapped__(pattern * 2, layer_spec="transformer_engine", **fields)
    save_checkpoint(local, tmp_path / "local")
    load_checkpoint(fused, tmp_path / "local")
    tokens = random_tokens(2, 20)
    torch.testing.assert_close(fused(tokens), local(tokens), rtol=1e-4, atol=1e-4)
    save_checkpoint(fused, tmp_path / "fused")
    saved = full_state_dict(fused)
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[name], given[name]) for name in given)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("local", "fused")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


@pytest.mark.parametrize(
    ("placement", "norms"),
    [
        ("pre", {"linear_qkv.layer_norm_weight"}),
        ("post", {"post_layernorm.weight"}),
        ("sandwich", {"linear_qkv.layer_norm_weight", "post_layernorm.weight"}),
    ],
)
def test_norm_placement(transformer_engine, placement, norms):
    fused = small_model("*", layer_spec="transformer_engine", norm_placement=placement)
    names = {name for name, _ in fused.named_parameters() if "norm" in name}
    assert names == {"decoder.final_norm.weight"} | {
        f"decoder.layers.0.{'self_attention.' if 'linear' in name else ''}{name}" for name in norms
    }
    local = small_model("*", layer_spec="local", norm_placement=placement)
    load_state(local, full_state_dict(fused))
    tokens = random_tokens(2, 20)
    torch.testing.assert_close(local(tokens), fused(tokens))


class NoMixer:
    def __init__(self, config, place): ...

    def cache_requirements(self): ...

    cut_reasons = training_reasons = cache_requirements


class OtherForward(Mixer):
    def __init__(self, config, place): ...

    def forward(self, hidden_Th): ...


@pytest.mark.parametrize(
    ("mixer", "message"),
    [(NoMixer, "must derive from"), (OtherForward, r"OtherForward.forward\(self, hidden_Th\) is")],
)
def test_a_mixer_of_another_package_that_cannot_run_is_refused(monkeypatch, mixer, message):
    kind = LayerKind("none", f"{__name__}:{mixer.__name__}", ())
    monkeypatch.setattr(LAYER_KINDS, "_things", {"!": kind})
    monkeypatch.setattr(LAYER_KINDS, "_checked", {})
    with pytest.raises(TypeError, match=f"the mixer of the layer kind '!'.*{message}"):
        get_mixer("!")
