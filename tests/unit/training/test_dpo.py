"""DPO: its losses, its data, and a run from a model and from adapters."""

import math
import shutil

import pytest
import torch
from index_folders import write_conversations
from megatron.core import parallel_state

from megatron_hybrid import HybridConfig, build_hybrid_model, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.text.document_encoder import DocumentEncoder
from megatron_hybrid.text.document_files import Chunk
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.dpo import DpoFields, DpoLoss
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.reports import LOG, read_log
from megatron_hybrid.training.trainer import Trainer, training_device

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")
TOKENIZER = Tokenizer.from_folder(DEMO_FOLDER)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_losses_and_gradients_are_those_of_the_formulas(kind):
    lengths, beta = [5, 3, 4, 7, 2], 0.3  # two pairs, and what fills the row
    size, random = sum(lengths), torch.Generator().manual_seed(1)
    given = -torch.rand(2, size, generator=random)
    mask = (torch.rand(size, generator=random) < 0.7).float()
    mask[[0, 5, 8, 12]], mask[-2:] = 1, 0
    fills = torch.arange(size)[None] >= size - 2
    tokens = torch.zeros(1, size, dtype=torch.int64)
    batch = Batch(tokens, tokens, mask[None], lengths, fills, {"reference": given[1:]})
    log_probs = given[:1].clone().requires_grad_()
    found = DpoLoss(DpoFields(beta, kind))(log_probs, batch)
    found.total.backward()

    policy, told = given[0].double().requires_grad_(), []
    starts, losses = [0, 5, 8, 12], []
    for one, other in ((0, 1), (2, 3)):
        rewards, counts = [], []
        for number in (one, other):
            place = range(starts[number], starts[number] + lengths[number])
            rewards.append(sum((policy[i] - given[1, i].double()) * mask[i] for i in place))
            counts.append(sum(mask[i] for i in place))
        margin = rewards[0] - rewards[1]
        mean_margin = rewards[0] / counts[0] - rewards[1] / counts[1]
        losses.append(
            {
                "sigmoid": torch.log(1 + torch.exp(-beta * margin)),
                "hinge": torch.clamp(1 - beta * margin, min=0),
                "ipo": (mean_margin - 1 / (2 * beta)) ** 2,
            }[kind]
        )
        told.append([float(margin > 0), *((beta * one).item() for one in (margin, *rewards))])
    sum(losses).backward()
    assert found.total.item() == pytest.approx(sum(losses).item(), rel=1e-6)
    torch.testing.assert_close(log_probs.grad[0].double(), policy.grad, atol=1e-6, rtol=1e-5)
    assert found.count == 2
    sums = [value.item() for value, _ in found.metrics.values()]
    assert sums == pytest.approx([sum(each) for each in zip(*told)], rel=1e-5)


def test_preferences_are_texts_or_chats_as_preprocess_renders_them(tmp_path):
    shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    system, asked = {"role": "system", "content": "Be."}, {"role": "user", "content": "Who?"}
    before = {"role": "assistant", "content": "no", "weight": 1}
    good, bad = ({"role": "assistant", "content": each} for each in ("He was.", "It"))
    records = [
        {"prompt": "Once upon", "chosen": " a time.", "rejected": " the sea."},
        {"prompt": [system, before, asked], "chosen": [good], "rejected": [bad]},
        {"prompt": "Who?", "chosen": [before, asked, good], "rejected": [before, asked, bad]},
        {"prompt": "Who?", "chosen": "a", "rejected": [bad]},
        {"prompt": [asked], "chosen": [good], "rejected": [asked]},
        {"chosen": "a", "rejected": "b"},
    ]
    encoder = DocumentEncoder(
        tmp_path / "model", "chosen", chat=True, append_eod=False, preferences=True
    )
    found = encoder.encode(Chunk(tmp_path / "a.jsonl", 1, records, 0))
    parts = torch.from_numpy(found.tokens.astype(int)).split(found.lengths)
    learnt = [
        [TOKENIZER.decode(ids[a:b].tolist(), False) for a, b in zip(spans[::2], spans[1::2])]
        for ids, spans in zip(parts, found.answers, strict=True)
    ]
    end = "<|endoftext|>"
    answers = [" a time.", " the sea.", "He was.", "It", "He was.", "It"]
    assert learnt == [[answer + end] for answer in answers]
    whole = TOKENIZER.decode(parts[5].tolist(), False)
    assert whole == f"<assistant>no{end}<user>Who?{end}<assistant>It{end}"
    assert [line.split(" ")[0] for line in found.broken] == [
        str(tmp_path / f"a.jsonl:{n}") for n in ("4", "5:", "6")
    ]
    assert 'two texts, or lists of messages, in "chosen" and "rejected"' in found.broken[0]


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


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}], ids=["whole", "lora"])
def test_a_run_learns_preferences_from_where_it_began(tmp_path, sections):
    config = HybridConfig(
        layer_pattern="M*-",
        hidden_size=32,
        num_attention_heads=2,
        vocab_size=3072,
        ffn_hidden_size=48,
        mamba_head_dim=8,
        mamba_state_dim=8,
        mamba_num_groups=1,
        hidden_dropout=0.0,
        init_method_std=0.1,
    )
    torch.manual_seed(3)
    save_checkpoint(build_hybrid_model(config), tmp_path / "base")
    TOKENIZER.save(tmp_path / "base")
    prefix = write_conversations(tmp_path / "p", *pairs(30), TOKENIZER, "preferences")
    values = {
        "model": {"pretrained": str(tmp_path / "base")},
        "tokenizer": "demo",
        "data": {"sequence_length": 64, "kind": "preferences", "train": [prefix]},
        "run": {"steps": 8, "global_batch_size": 2, "stop_at_step": 4},
        "optimizer": {"learning_rate": 1e-2},
        "dpo": {"beta": 0.2},
        "checkpoints": {"asynchronous": False},
        "reports": {"every_steps": 1},
        **sections,
    }

    def train(*overrides, folder="run"):
        parallel_state.destroy_model_parallel()
        recipe = Recipe.of(values, overrides)
        trainer = Trainer(recipe, tmp_path / folder, torch.device("cpu"))
        trainer.train()
        trainer.close()
        return read_log(tmp_path / folder / LOG)

    with training_device():
        log = train("run.stop_at_step=8", folder="whole")
        first, last = log[0], log[-1]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert (first["chosen_reward"], first["rejected_reward"]) == pytest.approx((0, 0), abs=1e-6)
        assert last["accuracy"] == 1 and last["margin"] > 0.1 and last["loss"] < first["loss"]
        train()
        again = train("run.stop_at_step=8")  # with the reference of the first steps
        names = ("step", "loss", "margin", "tokens")
        assert [[one[n] for n in names] for one in again] == [
            [one[n] for n in names] for one in log
        ]
        with pytest.raises(CheckpointError, match=r"was saved with dpo=.*'beta': 0.2"):
            train("dpo.beta=0.3", "run.steps=8")
        for overrides, match in (
            (["dpo=null"], "data.kind is 'preferences', which cross entropy cannot rank"),
            (["model.moe_aux_loss_coeff=0.1"], "DpoLoss does not count labels, by which .*=0.1 is"),
            (["data.kind=sft"], "dpo trains on preferences, and data.kind is 'sft'"),
            (["data.sequence_length_warmup=[[2,8]]"], "cuts sequences, which preferences compare"),
        ):
            with pytest.raises(ValueError, match=match):
                train(*overrides, folder="refused")
