"""The calls of Megatron's `pretrain_hybrid.py` train our model, on one rank and on three stages."""

from functools import partial

import pytest
import torch
from core_training import data_parallel, ignore_warnings_of_core, set_up_groups
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.utils import get_attr_wrapped_model
from rank_processes import run_micro_batches, train_on_ranks
from small_models import packed_params, small_config

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from megatron_hybrid.models.hybrid_model import build_hybrid_model

pytestmark = ignore_warnings_of_core

LENGTH, MICRO_BATCHES, STEPS, EOD = 20, 2, 3, 60
PATTERN = "M*|G-|W"


def batch(number: int, resets: bool) -> dict[str, torch.Tensor]:
    """A batch of one row as GPTDataset makes it; documents end at tokens 6 and 13."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(0, EOD, (LENGTH + 1,), generator=generator)
    text[6] = text[13] = EOD
    mask, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
        text[:-1],
        EOD,
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=True,
        create_attention_mask=True,
    )
    rows = {"tokens": text[:-1], "labels": text[1:], "loss_mask": loss_mask}
    rows |= {"position_ids": position_ids, "attention_mask": mask}
    return {name: row[None] for name, row in rows.items()}


def get_batch(data_iterator, packed: bool) -> dict:
    """What each pipeline stage gets: all of it, parts, or nothing but boundaries."""
    given = next(data_iterator)
    kept = set()
    if parallel_state.is_pipeline_first_stage():
        kept |= {"tokens", "position_ids", "attention_mask"}
    if parallel_state.is_pipeline_last_stage():
        kept |= {"labels", "loss_mask", "attention_mask"}
    batch = {name: rows if name in kept else None for name, rows in given.items()}
    return batch | {"packed_seq_params": packed_params(0, 7, 14, LENGTH) if packed else None}


def forward_step(packed, data_iterator, model):
    assert get_attr_wrapped_model(model, "vp_stage") is None
    given = get_batch(data_iterator, packed)
    loss_mask = given["loss_mask"]
    output = model(
        given["tokens"],
        given["position_ids"],
        given["attention_mask"],
        labels=given["labels"],
        packed_seq_params=given["packed_seq_params"],
        loss_mask=loss_mask,
    )
    return output, partial(loss_func, loss_mask)


def loss_func(loss_mask, output):
    loss = (output.view(-1).float() * loss_mask.view(-1)).sum()
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": loss.clone().detach()}


def losses(folder, num_stages: int, resets: bool, packed: bool, **fields) -> list[float]:
    """The summed loss of each step; empty but on the last stage."""
    sizes = {"pipeline_model_parallel_size": num_stages}
    set_up_groups(sizes)
    pattern = PATTERN if num_stages == 3 else PATTERN.replace("|", "")
    config = small_config(pattern, **sizes, calculate_per_token_loss=True, **fields)
    model = build_hybrid_model(config)
    load_checkpoint(model, folder / "weights", cast=True)
    model = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-2)
    sums = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        data = [batch(i, resets) for i in range(MICRO_BATCHES)]
        reports = run_micro_batches(partial(forward_step, packed), model, data, LENGTH)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        sums += [sum(report["lm loss"].item() for report in reports)] if reports else []
    return sums


def run(folder, num_stages):
    if num_stages > 1:
        with pytest.raises(ValueError, match="Pass packed_seq_params on all stages") as error:
            raise_for_documents(folder, num_stages)
        assert f"pipeline_model_parallel_size={num_stages}" in str(error.value)
    kinds = {"whole": (False, False), "packed": (True, True)}
    kinds |= {"documents": (True, False)} if num_stages == 1 else {}
    results = {name: losses(folder, num_stages, *kind) for name, kind in kinds.items()}
    rounded = {"params_dtype": torch.bfloat16, "fp32_residual_connection": True}
    results["fp32 residual"] = losses(folder, num_stages, False, False, **rounded)
    return results


def raise_for_documents(folder, num_stages):
    """On each stage alone, so that none waits for another."""
    sizes = {"pipeline_model_parallel_size": num_stages}
    set_up_groups(sizes)
    model = build_hybrid_model(small_config(PATTERN, **sizes))
    given = batch(0, True)
    model(given["tokens"], given["position_ids"], given["attention_mask"])


def test_the_calls_of_the_stock_script_train_our_model(tmp_path):
    torch.manual_seed(5)
    save_checkpoint(
        build_hybrid_model(small_config(PATTERN.replace("|", ""))), tmp_path / "weights"
    )
    results = {}
    for num_stages in (1, 3):
        folder = tmp_path / str(num_stages)
        ranks = train_on_ranks(run, num_stages, folder, tmp_path, num_stages)
        results[num_stages] = ranks[-1]
    whole, packed = results[1]["whole"], results[1]["packed"]
    assert whole[-1] < whole[0] * 0.98 and packed[-1] < packed[0] * 0.98
    assert results[1]["documents"] == packed != whole
    for name in ("whole", "packed"):
        assert results[3][name] == pytest.approx(results[1][name], rel=1e-5)
    # Nothing is rounded between stages.
    assert results[3]["fp32 residual"][0] == results[1]["fp32 residual"][0]
    assert results[1]["fp32 residual"] == pytest.approx(whole, rel=1e-2)
