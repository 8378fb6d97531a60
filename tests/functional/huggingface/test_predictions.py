"""Parts for multi-token prediction in Hugging Face folders, against layers of transformers."""

import re
import shutil
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch
from bars import check_bars
from drafted import noted
from huggingface import build, read_values
from matrix import matrix_rows
from model_folders import rewrite
from packed_folders import FORMATS as FORMATS_OF
from packed_folders import stored_bytes, write_folders
from reference import tiny_engine
from safetensors.torch import load_file

import megatron_hybrid as mh
from megatron_hybrid.checkpoints import tensor_source
from megatron_hybrid.checkpoints.checkpoint import CheckpointError, read_config, save_huggingface
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.tools.convert import convert
from megatron_hybrid.tools.plan import plan, read_model_config

OF_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
}
GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=8)


@dataclass
class Released:
    """How an architecture's folders name the part, whose layers are those of another model."""

    pattern: str
    layers: dict[str, str]
    """Of the other model, and their names in the part."""
    names: dict[str, str] = field(default_factory=OF_QWEN.copy)
    announced: dict = field(default_factory=lambda: {"mtp_num_hidden_layers": 1})
    copies: dict[str, str] = field(default_factory=dict)


ONE = "model.layers.3."
OF_NEMOTRON = {name: f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")}
OF_NEMOTRON["norm"] = "mtp.layers.1.final_layernorm"
PUZZLE = read_values("nemotron_h_puzzle")["block_configs"]
RELEASED = {
    "qwen3_next": Released("*E", {"model.layers.3.": "mtp.layers.0."}, announced={}),
    "qwen3_5": Released("*-", {"model.layers.3.": "mtp.layers.0."}),
    "qwen3_5_moe": Released("*E", {"model.layers.3.": "mtp.layers.0."}),
    "deepseek_v3": Released(
        "+E",
        {"model.layers.2.": ONE},
        {name: f"{ONE}{name}" for name in ("enorm", "hnorm", "eh_proj")}
        | {"norm": f"{ONE}shared_head.norm"},
        {"num_nextn_predict_layers": 1},
        {
            f"{ONE}embed_tokens.weight": "model.embed_tokens.weight",
            f"{ONE}shared_head.head.weight": "lm_head.weight",
        },
    ),
    "nemotron_h_moe": Released(
        "*E",
        {"backbone.layers.2.": "mtp.layers.0.", "backbone.layers.3.": "mtp.layers.1."},
        OF_NEMOTRON,
        {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    ),
    "nemotron_h_puzzle": Released(
        "*E",
        {"model.layers.5.": "mtp.layers.0.", "model.layers.4.": "mtp.layers.1."},
        OF_NEMOTRON,
        {"num_nextn_predict_layers": 1, "mtp_block_configs": [PUZZLE[5], PUZZLE[4]]},
    ),
}


class Reference:
    """The model and its part, of transformers' modules, without any cache."""

    def __init__(self, name: str):
        self.model, other = build(name), build(name, seed=7)
        self.other = other
        numbers = [int(layer.split(".")[2]) for layer in RELEASED[name].layers]
        self.layers = [other.get_decoder().layers[number] for number in numbers]
        decoder = self.model.get_decoder()
        norm = getattr(decoder, "norm", None) or decoder.norm_f
        torch.manual_seed(3)
        self.norms = {own: deepcopy(norm) for own in ("enorm", "hnorm", "norm")}
        for each in self.norms.values():
            each.weight.data += torch.randn_like(each.weight) * 0.2
        size = self.model.config.hidden_size
        self.eh_proj = torch.randn(size, 2 * size) * size**-0.5

    def save(self, folder, released: Released) -> dict[str, torch.Tensor]:
        """Write a folder as released; its tensors."""
        self.other.save_pretrained(folder / "other")
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in load_file(folder / "other" / "model.safetensors").items():
            for layer, own in released.layers.items():
                if name.startswith(layer):
                    tensors[own + name.removeprefix(layer)] = tensor
        for name, norm in self.norms.items():
            tensors[f"{released.names[name]}.weight"] = norm.weight.detach().clone()
        tensors[f"{released.names['eh_proj']}.weight"] = self.eh_proj
        tensors |= {name: tensors[other].clone() for name, other in released.copies.items()}
        rewrite(folder, lambda _: tensors, **released.announced)
        return tensors

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        decoder, drafts = self.model.get_decoder(), []
        ids = torch.tensor([tokens])
        hidden = decoder(ids, use_cache=False).last_hidden_state[:, :-1]
        for _ in range(count):
            embedding = self.model.get_input_embeddings()(ids[:, 1:])
            x = torch.cat((self.norms["enorm"](embedding), self.norms["hnorm"](hidden)), -1)
            x, size = x @ self.eh_proj.T, x.shape[1]
            mask = torch.full((size, size), torch.finfo(x.dtype).min).triu(1)[None, None]
            positions = torch.arange(size)[None]
            more = {"position_ids": positions}
            if hasattr(decoder, "rotary_emb"):
                more["position_embeddings"] = decoder.rotary_emb(x, positions)
            for layer in self.layers:
                x = layer(x, attention_mask=mask, **more)
            rows = self.norms["norm"](x)[:, -1:]
            drafts.append(int(self.model.lm_head(rows).argmax()))
            ids = torch.cat((ids, torch.tensor([drafts[-1:]])), 1)
            hidden = torch.cat((hidden, rows), 1)
        return drafts


@pytest.mark.parametrize(
    "name", matrix_rows(RELEASED, "qwen3_next", "deepseek_v3", "nemotron_h_moe")
)
def test_a_folders_part_drafts_as_in_transformers_and_is_written_back(tmp_path, name):
    released, reference = RELEASED[name], Reference(name)
    tensors = reference.save(tmp_path, released)
    model, _ = mh.load_pretrained(tmp_path, mtp=True)
    assert model.config.layer_pattern.partition("/")[2] == released.pattern

    prompt = torch.randint(3, 100, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = tiny_engine(model).generate([prompt], GREEDY)[0].token_ids
    engine = tiny_engine(model, speculation="mtp", num_speculative_tokens=2)
    told = noted(engine)
    for each in (prompt, [*prompt, *expected, 5, 6]):
        engine.generate([each], GREEDY)
    assert engine.generate([prompt], GREEDY)[0].token_ids == expected
    for tokens, drafts in told:
        assert drafts and drafts == reference.drafts(tokens, len(drafts))

    save_huggingface(model, tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())

    # What is announced, or is here, is counted.
    for path in (tmp_path, *([tmp_path / "written" / "config.json"] if released.announced else [])):
        (tmp_path / "written" / "model.safetensors").unlink(missing_ok=True)
        result = plan(read_model_config(path, mtp=True), 10**9, 512, num_speculative_tokens=2)
        assert result.settings["speculation"] == "mtp"
        assert result.parameters == sum(map(torch.numel, model.parameters()))
        assert result.model.kv_bytes_per_token == engine.cache.spec.kv_bytes_per_token


def test_a_part_is_loaded_only_where_it_is_asked_for_and_conversions_keep_it(
    tmp_path, caplog, monkeypatch
):
    advanced = check_bars(monkeypatch, tensor_source)
    source, ours, back = (tmp_path / name for name in ("source", "ours", "back"))
    Reference("deepseek_v3").save(source, RELEASED["deepseek_v3"])
    convert(source, ours, "ours")
    convert(ours, back, "huggingface")
    given, written = (load_file(f / "model.safetensors") for f in (source, back))
    assert given.keys() == written.keys()
    whole = mh.load_pretrained(source, mtp=True)[0]
    sent = own_tensors(whole)
    of_part = sum(map(torch.numel, whole.mtp.parameters()))
    for folder in (source, ours):
        model, _ = mh.load_pretrained(folder)
        sizes = [sum(map(torch.numel, each.parameters())) for each in (model, whole)]
        planned = plan(read_model_config(folder), 10**9, 9).parameters
        assert sizes[0] == sizes[1] - of_part == planned
        engine = tiny_engine(model)
        engine.load_weights(sent)  # a trainer sends what it has
        answers = [one.generate([[5, 6, 7]], GREEDY)[0] for one in (engine, tiny_engine(whole))]
        assert answers[0].token_ids == answers[1].token_ids
    save_huggingface(mh.load_pretrained(source)[0], tmp_path / "less")
    assert max(advanced) > 0
    assert "less has no MTP head, which" in caplog.text
    assert "/" not in read_config(ours, pipeline_model_parallel_size=2).layer_pattern
    assert load_file(tmp_path / "less" / "model.safetensors").keys() < given.keys()


PROJECTIONS = r"(_proj|experts\.\d+\.\w+|shared_experts?\.\w+)$"
FORMATS = [("qwen3_next", "fp8-block"), ("deepseek_v3", "fp8-block"), ("nemotron_h_moe", "ct-int8")]


@pytest.mark.parametrize(
    ("name", "kind", "is_packed"),
    matrix_rows(
        [(*each, is_packed) for each in FORMATS for is_packed in (True, False)],
        *((*each, i != 1) for i, each in enumerate(FORMATS)),
    ),
)
def test_a_part_beside_packed_weights_may_be_packed_or_not(tmp_path, name, kind, is_packed):
    released, source = RELEASED[name], tmp_path / "source"
    Reference(name).save(source, released)
    shutil.rmtree(source / "other")
    rewrite(source, lambda t: {key: each.bfloat16() for key, each in t.items()}, dtype="bfloat16")
    own = "|".join(map(re.escape, [*released.layers.values(), "eh_proj"]))
    others = rf"^(?!{own})(?!.*eh_proj).*{PROJECTIONS}"
    packed, plain = write_folders(
        source, tmp_path, {PROJECTIONS if is_packed else others: kind}, FORMATS_OF[kind][1]
    )
    model, other = (mh.load_pretrained(folder, mtp=True)[0] for folder in (packed, plain))
    of_part = [each for each in model.mtp.modules() if isinstance(each, PackedWeight)]
    assert bool(of_part) == is_packed
    hidden, ids = torch.randn(9, 48, dtype=torch.bfloat16), torch.arange(9)
    context = UncachedContext(RaggedLayout((9,), (0,)), "cpu")
    with torch.no_grad():
        rows = [each.predict(hidden, ids, context) for each in (model, other)]
    torch.testing.assert_close(*rows, rtol=0, atol=0)
    save_huggingface(model, tmp_path / "back")
    assert stored_bytes(tmp_path / "back") == stored_bytes(packed)
    config = read_model_config(packed, mtp=True)
    assert plan(config, 10**9, 512, folder=packed).weight_bytes == sum(
        p.nbytes for p in model.parameters()
    )


def test_a_part_with_an_embedding_of_its_own_is_refused(tmp_path):
    Reference("deepseek_v3").save(tmp_path, RELEASED["deepseek_v3"])
    name = f"{ONE}embed_tokens.weight"
    rewrite(tmp_path, lambda tensors: tensors | {name: tensors[name] + 1})
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight differs .*multi-token"):
        mh.load_pretrained(tmp_path, mtp=True)
