"""Losses of one's own: DPO and GRPO, their data, and runs that learn by them."""

import json
import math
import shutil
import sys
import textwrap

import pytest
import torch
from index_folders import write_conversations
from small_recipes import SIZES, small_recipe, train_alone

from megatron_hybrid import HybridConfig, build_hybrid_model, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.text.document_encoder import DocumentEncoder
from megatron_hybrid.text.document_files import Chunk
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.data.preprocess import preprocess
from megatron_hybrid.training.dpo import DpoFields, DpoLoss
from megatron_hybrid.training.grpo import GrpoFields, GrpoLoss
from megatron_hybrid.training.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")
TOKENIZER = Tokenizer.from_folder(DEMO_FOLDER)


@pytest.fixture
def packed():
    """A row of two pairs, and what fills it: the batch, log-probabilities of the labels, and for
    each sequence the places of its labels."""
    lengths, random = [5, 3, 4, 7, 2], torch.Generator().manual_seed(1)
    size, starts = sum(lengths), [0, 5, 8, 12]
    log_probs, reference, drawn, advantage = -2 * torch.rand(4, 1, size, generator=random)
    mask = (torch.rand(1, size, generator=random) < 0.7).float()
    mask[:, starts], mask[:, -2:] = 1, 0
    fills, tokens = torch.arange(size)[None] >= size - 2, torch.zeros(1, size, dtype=torch.int64)
    columns = {"reference": reference, "drawn": drawn, "advantage": advantage + 1, "reward": drawn}
    batch = Batch(tokens, tokens, mask, lengths, fills, columns)
    places = [[i for i in range(s, s + n) if mask[0, i]] for s, n in zip(starts, lengths)]
    return batch, log_probs.requires_grad_(), places


def check(found, log_probs, policy, total, count, metrics):
    """Compare with a loss in float64. metrics: their means."""
    found.total.backward()
    total.backward()
    assert found.total.item() == pytest.approx(total.item(), rel=1e-6) and found.count == count
    torch.testing.assert_close(log_probs.grad[0].double(), policy.grad, atol=1e-6, rtol=1e-5)
    means = {name: (value / number).item() for name, (value, number) in found.metrics.items()}
    assert means == pytest.approx(
        {name: torch.as_tensor(value).item() for name, value in metrics.items()}, rel=1e-5
    )


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_losses_of_dpo_are_those_of_the_formulas(packed, kind):
    batch, log_probs, places = packed
    found, beta = DpoLoss(DpoFields(0.3, kind))(log_probs, batch), 0.3
    policy, reference = (x[0].detach().double() for x in (log_probs, batch.columns["reference"]))
    policy.requires_grad_()
    gains = [[policy[i] - reference[i] for i in of_one] for of_one in places]
    pairs = [(gains[0], gains[1]), (gains[2], gains[3])]
    losses = {
        "sigmoid": [torch.log(1 + torch.exp(-beta * (sum(y) - sum(n)))) for y, n in pairs],
        "hinge": [torch.clamp(1 - beta * (sum(y) - sum(n)), min=0) for y, n in pairs],
        "ipo": [(mean(y) - mean(n) - 1 / (2 * beta)) ** 2 for y, n in pairs],
    }[kind]
    rewards = [[beta * sum(one).item() for one in pair] for pair in pairs]
    metrics = {
        "accuracy": mean([yes > no for yes, no in rewards]),
        "margin": mean([yes - no for yes, no in rewards]),
        "chosen_reward": mean([yes for yes, _ in rewards]),
        "rejected_reward": mean([no for _, no in rewards]),
    }
    check(found, log_probs, policy, sum(losses), 2, metrics)


@pytest.mark.parametrize(("mean_over", "beta"), [("tokens", 0.0), ("sequences", 0.1)])
def test_the_loss_of_grpo_is_that_of_the_formula(packed, mean_over, beta):
    batch, log_probs, places = packed
    fields = GrpoFields("m:f", clip=0.2, clip_high=0.3, beta=beta, mean_over=mean_over)
    found = GrpoLoss(fields)(log_probs, batch)
    columns = {name: value[0].double() for name, value in batch.columns.items()}
    policy = log_probs[0].detach().double().requires_grad_()

    def of_token(i):
        ratio, far = torch.exp(policy[i] - columns["drawn"][i]), columns["reference"][i] - policy[i]
        advantage, kl = columns["advantage"][i], torch.exp(far) - far - 1
        bounded = min(max(ratio, 0.8), 1.3) * advantage
        is_clipped = float(bounded < ratio * advantage)
        return beta * kl - min(ratio * advantage, bounded), abs(ratio - 1), is_clipped, kl

    tokens = [[of_token(i) for i in of_one] for of_one in places]
    flat = [token for of_one in tokens for token in of_one]
    _, ratio_error, clipped, kl = map(mean, zip(*flat))
    assert 0 < clipped < 1
    losses = [token[0] for token in flat]
    if mean_over == "sequences":
        losses = [mean([token[0] for token in of_one]) for of_one in tokens]
    metrics = {
        "reward": mean([mean([columns["reward"][i] for i in of_one]) for of_one in places]),
        "length": mean([len(of_one) for of_one in places]),
        **{"ratio_error": ratio_error, "clipped": clipped},
        **({"kl": kl} if beta else {}),
    }
    check(found, log_probs, policy, sum(losses), len(losses), metrics)


def test_preferences_are_texts_or_chats_as_preprocess_renders_them(tmp_path):
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    system, asked = {"role": "system", "content": "Be."}, {"role": "user", "content": "Who?"}
    before = {"role": "assistant", "content": "no", "weight": 1}
    good, bad = ({"role": "assistant", "content": each} for each in ("He was.", "It"))
    records = [
        {"prompt": "Once upon", "chosen": " a time.<|endoftext|>", "rejected": " the sea."},
        {"prompt": [system, before, asked], "chosen": [good], "rejected": [bad]},
        {"prompt": "Who?", "chosen": [before, asked, good], "rejected": [before, asked, bad]},
        {"prompt": "Who?", "chosen": "a", "rejected": [bad]},
        {"prompt": [asked], "chosen": [good], "rejected": [asked]},
        {"chosen": "a", "rejected": "b"},
        {"prompt": "Who?", "answer": "a"},
    ]
    encoder = DocumentEncoder(
        tmp_path / "model", "chosen", chat=True, append_eod=False, preferences=True
    )
    found = encoder.encode(Chunk(tmp_path / "a.jsonl", 1, records, 0))
    parts = torch.from_numpy(found.tokens.astype(int)).split(found.lengths)
    learnt = [
        [TOKENIZER.decode(ids[a:b].tolist(), False) for a, b, _ in spans.tolist()]
        for ids, spans in zip(parts, found.answers, strict=True)
    ]
    end = "<|endoftext|>"
    answers = [" a time.", " the sea.", "He was.", "It", "He was.", "It"]
    assert learnt == [[answer + end] for answer in answers]
    whole = TOKENIZER.decode(parts[5].tolist(), False)
    assert whole == f"<assistant>no{end}<user>Who?{end}<assistant>It{end}"
    assert [line.split(" ")[0] for line in found.broken] == [
        str(tmp_path / f"a.jsonl:{n}") for n in ("4", "5:", "6", "7")
    ]
    assert 'two texts, or lists of messages, in "chosen" and "rejected"' in found.broken[0]
    assert found.broken[3].endswith('has "chosen", "rejected" and, for texts, "prompt"')


def test_texts_of_preferences_need_an_end_token_and_no_template(tmp_path):
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    (tmp_path / "a.jsonl").write_text('{"prompt": "Who", "chosen": " he", "rejected": " I"}')
    files = [tmp_path / "a.jsonl"], tmp_path / "model"
    preprocess(*files, tmp_path / "a", preferences=True, workers=1)
    assert (tmp_path / "a.idx").exists()
    settings = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": None})
    )
    with pytest.raises(ValueError, match=r"a.jsonl:1 has texts, which end with .* give it an eos_"):
        preprocess(*files, tmp_path / "b", preferences=True, workers=1)


def pairs(count):
    """Pairs of unequal length; the answers of chosen ones have tokens of their own."""
    sides = ((400, 3), (500, 5))
    asked = [[300 + i % 7] * (3 + i % 4) for i in range(count)]
    tokens = [[*ask, *range(first, first + n)] for ask in asked for first, n in sides]
    return tokens, [[(len(ask), len(ask) + n)] for ask in asked for _, n in sides]


def test_both_of_a_pair_are_in_one_row_and_a_half_pair_in_none(tmp_path):
    tokens, answers = pairs(41)
    tokens[0][:0], answers[0] = [300] * 60, []  # no answer in its half of a row
    prefix = write_conversations(tmp_path / "p", tokens, answers, TOKENIZER, "preferences")
    fields = DataFields(32, kind="preferences", blend=[prefix], split="51,49")
    train, valid, _ = build_datasets(fields, TOKENIZER, (None, None, 0))
    seen = []
    for row in (data[i] for data in (train, valid) for i in range(len(data))):
        ends = torch.tensor([0, *row["lengths"]]).cumsum(0).tolist()
        real = ends[: len(row["lengths"]) + (row["padding"] == 0)]
        first = [row["labels"][end - 1].item() for end in real[1:]]
        assert first == [402, 504] * (len(first) // 2) and first
        seen += [row["tokens"][start].item() for start in real[:-1:2]]
    assert len(seen) in (39, 40)  # the split may divide a pair


def recipe(data, run, **sections):
    optimizer = {"learning_rate": 1e-3, "decay": "constant"}
    sections = {"optimizer": optimizer, "checkpoints": {"every_steps": 4, "keep": 0}, **sections}
    data, run = {"sequence_length": 64, **data}, {"steps": 6, **run}
    return small_recipe(data=data, run=run, **sections).to_dict()


def train(values, folder, *overrides):
    return train_alone(Recipe.of(values, overrides), folder)


def check_resumed(values, folder, names):
    """Train, and go on from step 4 once more; return the log."""
    log = train(values, folder / "whole")
    shutil.copytree(folder / "whole/iter_0000004", folder / "run/iter_0000004")
    again = train(values, folder / "run")
    names = ("step", "loss", "tokens", *names)
    kept = [[one[name] for name in names] for one in log[4:]]
    assert [[one[name] for name in names] for one in again] == kept and len(kept) == 2
    return log


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}], ids=["whole", "lora"])
def test_a_run_learns_preferences_from_where_it_began(tmp_path, sections):
    config = HybridConfig(layer_pattern="M*-", vocab_size=3072, **SIZES)
    torch.manual_seed(3)
    save_checkpoint(build_hybrid_model(config), tmp_path / "base")
    prefix = write_conversations(tmp_path / "p", *pairs(30), TOKENIZER, "preferences")
    data = {"kind": "preferences", "train": [prefix]}
    model = {"pretrained": str(tmp_path / "base")}
    values = recipe(data, {"global_batch_size": 2}, model=model, dpo={"beta": 0.2}, **sections)
    values["optimizer"]["learning_rate"] = 1e-2
    first, *_, last = check_resumed(values, tmp_path, ["margin"])
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (first["chosen_reward"], first["rejected_reward"]) == pytest.approx((0, 0), abs=1e-6)
    assert last["accuracy"] == 1 and last["margin"] > 0.1 and last["loss"] < first["loss"]
    with pytest.raises(CheckpointError, match=r"was saved with dpo\.beta=0.2, .* has 0.3"):
        train(values, tmp_path / "run", "dpo.beta=0.3")


def test_rewards_rise_and_the_engine_drew_with_the_weights_that_are_trained(
    tmp_path, monkeypatch, capsys
):
    source = """
    def letters(prompts, completions, completion_ids, letter):
        assert len({len(x) for x in (prompts, completions, completion_ids, letter)}) == 1
        for ids, each in zip(completion_ids, letter):
            ids.sort()
            each.append("z")  # to a copy
        return [float(text.count("".join(each)[:-1])) for text, each in zip(completions, letter)]
    def none(completions, **columns):
        return []
    def raises(completions, letter, **columns):
        import torch
        torch.set_grad_enabled(False)
        return [float(text + each[0]) for text, each in zip(completions, letter)]
    def changes(completions, completion_ids, letter, **columns):
        import torch
        torch.set_grad_enabled(False)
        [ids.clear() for ids in completion_ids]
        return letters(completions, completions, completion_ids, letter)
    def words(completions, **columns):
        return ["1"] * len(completions)
    number = 3
    """
    (tmp_path / "rewards_of_a_test.py").write_text(textwrap.dedent(source))
    records = [
        {"prompt": text, "letter": ["a"], "completions": 3}
        for text in ("Once upon", "The sea", "He was")
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    grpo = {"reward": "rewards_of_a_test:letters", "max_tokens": 6, "cache_bytes": 8 << 20}
    values = recipe(
        {"kind": "prompts", "train": ["p.jsonl"], "sequence_length": 32},
        {"global_batch_size": 16, "micro_batch_size": 8},
        model={"pretrained": "demo", "params_dtype": "float32"},
        grpo={**grpo, "updates": 2, "beta": 0.01},
    )
    log = check_resumed(values, tmp_path, ["reward", "kl", "ratio_error"])
    assert all(one["ratio_error"] < 1e-5 for one in log[::2]) and log[0]["kl"] < 1e-9
    assert all(one["ratio_error"] > 1e-3 for one in log[1::2])
    assert log[-1]["reward"] > log[0]["reward"] + 0.5 and log[-1]["kl"] > 0
    changed = train(values, tmp_path / "c", "grpo.reward=rewards_of_a_test:changes", "run.steps=2")
    assert [one["loss"] for one in changed[:1]] == [one["loss"] for one in log[:1]]
    assert changed[1]["gradient_norm"] > 0
    for overrides, match in (
        (
            ["grpo.reward=rewards_of_a_test:raises"],
            r"_test:raises raised ValueError\(.could not convert .*rewards_of_a_test.py:13\); rows "
            r"in the call: 1, the first is of .*p.jsonl:\d, '",
        ),
        (["grpo.reward=rewards_of_a_test:none"], r"returned \[\]; it must be a list of 16 finite"),
        (["grpo.reward=rewards_of_a_test:words"], r"returned \['1',.*; it must be a list of 16"),
        (["grpo.reward=rewards_of_a_test:no"], "must be module:function, of a module in "),
        (["grpo.reward=rewards_of_a_test:number"], r"must be module:function.*\(that is 3\)"),
        (
            ["run.global_batch_size=12", "run.micro_batch_size=4"],
            "no multiple of grpo.group_size=8 times the 1 data-par",
        ),
        (
            ["grpo.max_tokens=64"],
            r"p.jsonl:1: .* and grpo.max_tokens is 64; .*_length=32",
        ),
        (["model.pipeline_model_parallel_size=2"], "grpo with pipeline_model_parallel_size=2"),
        (["run.eval_every_steps=1"], "run.eval_every_steps has no meaning with grpo"),
        (["grpo=null"], "data.kind is 'prompts', of which cross entropy learns nothing: set grpo"),
        (["grpo.mean_over=sequences", "model.moe_aux_loss_coeff=0.1"], "GrpoLoss does not count"),
        (["data.sequence_length_warmup=[[2,8]]"], "would cut the answers to prompts"),
        (["data.kind=sft"], "grpo trains on prompts, and data.kind is 'sft'"),
        (["data.blend=[p.jsonl]", "data.train=[]"], "prompts are files in train, without weights"),
    ):
        with pytest.raises(ValueError, match=match):
            train(values, tmp_path / "refused", *overrides)
