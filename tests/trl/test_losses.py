"""Losses of DPO and GRPO, and their gradients, beside TRL's own code on the same batch."""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.dpo_trainer as trl_dpo
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.dpo import DpoFields, DpoLoss
from megatron_hybrid.training.grpo import GrpoFields, GrpoLoss

ROWS, PROMPT, LONGEST = 8, 6, 20
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(3, LONGEST, (ROWS,), generator=GENERATOR)
MASK = (torch.arange(LONGEST) < LENGTHS[:, None]).float()
OWN, REFERENCE = -3 * torch.rand(2, ROWS, LONGEST, generator=GENERATOR)
DRAWN = OWN + 0.3 * torch.randn(ROWS, LONGEST, generator=GENERATOR)
ADVANTAGES = torch.randn(ROWS, generator=GENERATOR)


def accelerator():
    same = {name: lambda x, *_, **__: x for name in ("gather", "gather_for_metrics", "reduce")}
    return SimpleNamespace(device="cpu", num_processes=1, **same)


def packed(order, **columns):
    """Log-probs of our own, which take gradients, and the batch: the completions in this order, one
    after another, each behind predictions of its prompt."""
    parts, ends = defaultdict(list), [PROMPT - 1 + int(LENGTHS[i]) for i in order]
    for i in order:
        for name, values in {"mask": MASK, "own": OWN, **columns}.items():
            before = torch.zeros(PROMPT - 1)
            parts[name].append(torch.cat([before, values[i, : LENGTHS[i]]]))
    rows = {name: torch.cat(each)[None] for name, each in parts.items()}
    mask, own = rows.pop("mask"), rows.pop("own").requires_grad_()
    tokens = torch.zeros_like(mask).long()
    return own, Batch(tokens, tokens, mask, ends, None, rows)


def assert_equal(loss, theirs, own, batch, order, kind):
    """kind: our loss, of the batch."""
    found = kind(own, batch)
    ours = found.total / found.count
    loss.backward()
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-5)
    expected = torch.cat([theirs.grad[i, : LENGTHS[i]] for i in order])
    torch.testing.assert_close(own.grad[batch.loss_mask > 0], expected, atol=1e-6, rtol=1e-5)
    return found


class Scored:
    """Stands for a model of TRL, of which log-probs are asked."""

    training = True

    def __init__(self, values):
        self.values = values

    def __call__(self, **inputs):
        full = torch.cat([torch.zeros(ROWS, PROMPT - 1), self.values * MASK], 1)
        nothing = torch.zeros_like(full)
        more = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
        return SimpleNamespace(log_probs=full, aux_loss=None, **more)


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_dpo(kind, beta, monkeypatch):
    monkeypatch.setattr(trl_dpo, "disable_gradient_checkpointing", lambda *_, **__: nullcontext())
    monkeypatch.setattr(trl_dpo, "is_peft_model", lambda model: False)
    theirs = OWN.clone().requires_grad_()
    trainer = SimpleNamespace(
        model=Scored(theirs),
        ref_model=Scored(REFERENCE),
        accelerator=accelerator(),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        **dict.fromkeys(("aux_loss_enabled", "precompute_ref_logps", "use_weighting"), False),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    shape = ROWS, PROMPT + LONGEST
    inputs = {
        "input_ids": torch.zeros(shape).long(),
        "attention_mask": torch.ones(shape),
        "completion_mask": torch.cat([torch.zeros(ROWS, PROMPT), MASK], 1).long(),
    }
    loss = DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    order = [i for pair in range(ROWS // 2) for i in (pair, pair + ROWS // 2)]
    own, batch = packed(order, reference=REFERENCE)
    found = assert_equal(loss, theirs, own, batch, order, DpoLoss(DpoFields(beta, kind)))
    total, count = found.metrics["accuracy"]
    (accuracy,) = trainer._metrics["train"]["rewards/accuracies"]
    assert (total / count).item() == pytest.approx(accuracy)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("mean_over", "kind"), [("sequences", "grpo"), ("tokens", "dapo")])
def test_grpo(mean_over, kind, beta):
    theirs = OWN.clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            theirs,
            torch.zeros(ROWS, LONGEST),
            None,
        ),
        model=SimpleNamespace(training=True),
        accelerator=accelerator(),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        **dict.fromkeys(("aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled"), False),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=0.28,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, PROMPT).long(),
        "prompt_mask": torch.ones(ROWS, PROMPT),
        "completion_ids": torch.zeros(ROWS, LONGEST).long(),
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": DRAWN,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    columns = {"reference": REFERENCE, "drawn": DRAWN, "reward": torch.ones_like(OWN)}
    own, batch = packed(range(ROWS), **columns, advantage=ADVANTAGES[:, None].expand_as(OWN))
    fields = GrpoFields("m:f", beta=beta, mean_over=mean_over, clip=0.2, clip_high=0.28)
    assert_equal(loss, theirs, own, batch, range(ROWS), GrpoLoss(fields))
