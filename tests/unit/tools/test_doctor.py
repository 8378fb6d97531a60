"""What `doctor` says of folders, against what loading them does."""

import json
import shutil

import pytest
import torch
from model_folders import rewrite
from reference import tiny_model

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.folder import config_of
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.cli import main
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.tools import doctor
from megatron_hybrid.tools.quantize import quantize

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def examine(path):
    rows, _, refusal = doctor.examine(path)
    return dict(rows), refusal


def folder_of_llama(path, **changes):
    """A folder of Hugging Face, whose config.json is changed after its weights were written."""
    mh.save_huggingface(build_hybrid_model(config_of(LLAMA, "llama", ())), path)
    rewrite(path, **changes)


def test_the_model_of_the_package(capsys):
    model, _ = mh.load_pretrained("demo")
    rows, refusal = examine("demo")
    assert refusal is None
    assert rows["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert rows["layer_pattern"] == model.config.layer_pattern
    assert main(["doctor", "demo"]) == 0
    out = capsys.readouterr().out
    assert "with a chat template" in out
    assert "loads           yes" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_config_alone_is_read(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"max_position_embeddings": 4096}))
    rows, refusal = examine(file)
    assert (rows["context"], refusal) == ("4,096 tokens", None)
    assert rows["layers"] == "2 x full attention, 2 x MLP"
    assert main(["doctor", str(file)]) == 0
    assert "config.json alone was read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, "not in "),
        ({"hidden_size": 40}, "has shape"),
        ({"hidden_act": "snake"}, "hidden_act='snake'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
)
def test_a_refusal_is_that_of_loading(tmp_path, capsys, changes, said):
    folder_of_llama(tmp_path, **changes)
    _, refusal = examine(tmp_path)
    assert said in refusal
    with pytest.raises(CheckpointError) as raised:
        mh.load_pretrained(tmp_path)
    assert str(raised.value) == refusal
    assert main(["doctor", str(tmp_path)]) == 1
    assert "loads           no:" in capsys.readouterr().out


def test_all_weights_are_read(tmp_path):
    model = build_hybrid_model(config_of(LLAMA, "llama", ()))
    with torch.no_grad():
        next(model.parameters())[3] = torch.nan
    mh.save_checkpoint(model, tmp_path)
    assert "NaN" in examine(tmp_path)[1]


@pytest.mark.parametrize(
    ("generation", "said"),
    [({"temperature": "hot"}, "temperature='hot'"), ({"eos_token_id": [1, 99999]}, "token 99999")],
)
def test_a_folder_that_answers_no_request_is_refused_as_by_an_engine(tmp_path, generation, said):
    shutil.copytree(DEMO_FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    refusal = examine(tmp_path)[1]
    assert said in refusal
    with pytest.raises(ValueError) as raised:
        mh.DynamicInferenceEngine(*mh.load_pretrained(tmp_path)).generate("Once")
    assert refusal in str(raised.value)


def test_packed_weights_have_their_size(tmp_path):
    quantize("demo", tmp_path, "fp8")
    loaded = sum(parameter.nbytes for parameter in mh.load_pretrained(tmp_path)[0].parameters())
    rows, _ = examine(tmp_path)
    assert rows["weights"].startswith(f"{loaded / 1e9:.3f} GB in bfloat16, float")
    assert loaded < 0.8 * sum(p.nbytes for p in mh.load_pretrained("demo")[0].parameters())


def test_an_adapter_alone_is_named_with_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for call in (examine, mh.load_pretrained):
        with pytest.raises(CheckpointError, match=r"adapter of PEFT .* Load org/base"):
            call(tmp_path)


def test_the_nearest_architecture_of_an_unknown_one_is_named(tmp_path):
    folder_of_llama(tmp_path, model_type="nollama")
    rows, refusal = examine(tmp_path)
    assert "'nollama', which no adapter reads. The nearest name is 'llama'." in refusal
    assert rows["nearest"].endswith("but for 0 tensors")
    (tmp_path / "model.safetensors").unlink()
    assert "nearest" not in examine(tmp_path)[0]


def test_a_folder_of_ours(tmp_path):
    model = tiny_model("M*-")
    mh.save_checkpoint(model, tmp_path)
    rows, refusal = examine(tmp_path)
    assert refusal is None
    assert rows["layers"] == "1 x Mamba-2, 1 x full attention, 1 x MLP"
    shutil.copy(tmp_path / "config.json", tmp_path / "other.json")
    assert examine(tmp_path / "other.json")[1] is None
