"""compat: what it says where megatron-core is missing, too old, or lacks a part."""

import importlib
import importlib.util
import sys
import textwrap
import warnings

import pytest
import torch
from commands import run_python
from megatron.core import package_info

from megatron_hybrid import compat
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def test_version_is_the_installed_one():
    assert package_info.__version__.startswith(".".join(map(str, compat.MEGATRON_CORE_VERSION)))


def import_error() -> str:
    """The error of compat where it is imported anew."""
    spec = importlib.util.spec_from_file_location("compat_again", compat.__file__)
    with pytest.raises(ImportError) as error:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return str(error.value)


def test_missing_triton_is_explained(monkeypatch):
    """As with 0.18 and later, which import triton unguarded."""

    class NoTriton:
        def find_spec(self, name, path=None, target=None):
            if name == "megatron.core":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.delitem(sys.modules, "megatron.core")
    monkeypatch.setattr(sys, "meta_path", [NoTriton(), *sys.meta_path])
    error = import_error()
    assert "this megatron-core imports `triton`" in error
    assert "pip install triton" in error


def test_missing_megatron_core_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    error = import_error()
    assert "megatron_hybrid is built on megatron-core, which is not installed" in error
    assert "pip install 'megatron-core>=0.16.1'" in error


@pytest.mark.parametrize("version", [(0, 15, 0), (0, 16, 0)])
def test_older_releases_are_refused(version, monkeypatch):
    monkeypatch.setattr(package_info, "VERSION", (*version, ""))
    error = import_error()
    assert f"{'.'.join(map(str, version))} is installed; megatron_hybrid needs 0.16.1" in error
    assert "pip install 'megatron-core>=0.16.1'" in error


@pytest.mark.parametrize(("version", "warned"), [((0, 19, 9), 0), ((0, 20, 0), 1), ((1, 2, 3), 1)])
def test_newer_releases_are_warned_of_before_a_part_that_they_lack_fails(
    version, warned, monkeypatch
):
    monkeypatch.setattr(package_info, "VERSION", (*version, ""))
    monkeypatch.setitem(sys.modules, "megatron.core.models.backends", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "import of megatron.core.models.backends halted" in import_error()
    found = f"megatron-core {'.'.join(map(str, version))} is installed; megatron_hybrid is tested"
    message = f"{found} with 0.16.1 up to 0.19.x"
    assert [str(each.message)[: len(message)] for each in caught] == [message] * warned


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.3.mixer.conv1d_weight", "decoder.layers.3.mixer.conv1d.weight"),
        ("decoder.layers.3.mixer.conv1d_bias", "decoder.layers.3.mixer.conv1d.bias"),
        ("output_layer.weight", "output_layer.weight"),
    ],
)
def test_names_of_both_releases(name, expected):
    assert compat.canonical_parameter_name(name) == expected


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("amp_C", None, "amp_C is not installed"),
        ("amp_C", "import nothing.of.this", "amp_C is installed, but ModuleNotFoundError: No mod"),
        ("amp_C", "raise OSError('libcudart.so.13')", "amp_C is installed, but OSError: libcudart"),
        ("amp_C", "raise SystemExit('no GPU')", "amp_C is installed, but SystemExit: no GPU"),
        ("amp_C", "multi_tensor_l2norm = 1", "amp_C is installed, but AttributeError: module"),
        ("apex/__init__", "raise RuntimeError('ABI')", "apex is installed, but RuntimeError: ABI"),
        ("apex/multi_tensor_apply", "", "apex is installed, but AttributeError: module 'apex.mu"),
        ("apex/normalization/fused_layer_norm", "assert False", None),
    ],
)
def test_an_accelerator_that_fails_is_hidden_from_core(file, text, reason, tmp_path, monkeypatch):
    """Absent, old, and broken in all ways: of `except ImportError`, which core has, all are absent.
    One extension of apex says nothing of the others."""
    parts = {
        "amp_C": "multi_tensor_l2norm = multi_tensor_scale = None",
        "apex/multi_tensor_apply": "multi_tensor_applier = None",
    }
    for name, content in {**parts, file: text}.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        found = compat._try_accelerators()
        assert (found.get("amp_C") or "").startswith(reason or "")
        assert ("amp_C" in found) == (reason is not None)
        with pytest.raises(ImportError):
            importlib.import_module(file.removesuffix("/__init__").replace("/", "."))
    finally:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] in ("apex", "amp_C"):
                del sys.modules[name]
    monkeypatch.setattr(compat, "_UNUSED", found)
    with pytest.raises(ValueError, match="fused_weight_gradient_mlp_cuda is not installed"):
        HybridConfig(
            layer_pattern="M", hidden_size=64, vocab_size=10, gradient_accumulation_fusion=True
        )


def test_an_old_transformer_engine_is_not_used_and_says_so(monkeypatch):
    """Its modules are there, and core found that it lacks a name."""
    assert "not installed" in compat.unused_accelerators()["transformer_engine.pytorch"]
    monkeypatch.setattr(compat, "_UNUSED", {})
    monkeypatch.setattr(compat, "have_transformer_engine", lambda: False)
    with pytest.raises(ImportError, match="this megatron-core needs another release"):
        compat.transformer_engine_modules()


def test_a_transformer_engine_that_core_fails_with_is_hidden(tmp_path, monkeypatch):
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    reason = compat._try_accelerators()["transformer_engine.pytorch"]
    assert "transformer_engine is installed, but ModuleNotFoundError: import of megatron" in reason
    assert sys.modules.pop("transformer_engine", "absent") is None


def test_no_warning_for_a_default():
    """core warns about the default of a field of CUDA graphs whenever a config is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HybridConfig(layer_pattern="M", hidden_size=64, vocab_size=10)


def test_importing_warns_of_nothing_loads_no_compiler_and_draws_no_number():
    """megatron-core warns of every GPU library that is not there, and decorates its functions with
    `torch.compile`."""
    script = """
        import importlib, pkgutil, random, sys, warnings
        import megatron_hybrid

        drawn = random.getstate()
        warnings.simplefilter("error", UserWarning)
        import megatron_hybrid.inference.engine
        assert "torch._inductor.compile_fx" not in sys.modules
        for module in pkgutil.walk_packages(megatron_hybrid.__path__, "megatron_hybrid."):
            # Kernels are imported where Triton is, by the backend that runs them; a program for
            # Dynamo where that is.
            others = ("__main__", ".triton", "_varlen", ".mcore")
            others += (".fla", ".hopper", ".dynamo")
            if not module.name.endswith(others):
                importlib.import_module(module.name)
        assert random.getstate() == drawn
        """
    result = run_python(textwrap.dedent(script))
    assert (result.returncode, result.stderr) == (0, "")


def test_a_function_is_compiled_once_when_it_is_first_called():
    compiled = []

    def compile_now(model, **options):
        compiled.append((model, options))
        return lambda x: ("compiled", model(x))

    decorate = compat.compile_at_first_call(compile_now)

    @decorate(dynamic=True)
    def double(x):
        """Twice x."""
        return 2 * x

    assert compiled == [] and double.__doc__ == "Twice x."
    assert [double(3), double(x=4)] == [("compiled", 6), ("compiled", 8)]
    assert compiled == [(double.__wrapped__, {"dynamic": True})]
    module = torch.nn.Linear(2, 2)  # what is no function is compiled at once
    decorate = compat.compile_at_first_call(lambda model: compiled.append(model) or model)
    assert decorate(module) is module is compiled[1]


def test_inside_of_a_compilation_a_function_is_a_part_of_it(monkeypatch):
    decorate = compat.compile_at_first_call(lambda model: pytest.fail("it is compiled alone"))
    double = decorate(lambda x: 2 * x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert double(3) == 6
