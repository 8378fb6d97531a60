"""Positions and masks of the caller: megatron-core's tell the documents, others are refused."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from reference import greedy, tiny_engine, tiny_model
from small_models import ALL_MIXERS, packed_params, random_tokens, small_model

from megatron_hybrid.models.batch_layout import (
    check_attention_mask,
    check_position_ids,
    row_padding,
)
from megatron_hybrid.ops.ragged import RaggedLayout

EOD = 60
OTHERS = dict(num_moe_experts=4, moe_ffn_hidden_size=20, attention_chunk_size=4, mamba_num_heads=6)


def documents():
    """Two rows of 12 tokens; the first ends a document at token 4, the second at token 7."""
    tokens = random_tokens(2, 12, vocab_size=EOD)
    tokens[0, 4] = tokens[1, 7] = EOD
    return tokens


def masks_and_positions(tokens, **resets):
    """What core's GPTDataset makes of each row, collated: [b, 1, s, s] bool and [b, s]."""
    resets = {"reset_position_ids": False, "reset_attention_mask": False, **resets}
    rows = [
        _get_ltor_masks_and_position_ids(
            row, EOD, eod_mask_loss=False, create_attention_mask=True, **resets
        )
        for row in tokens
    ]
    return torch.stack([row[0] for row in rows]), torch.stack([row[2] for row in rows])


@torch.no_grad()
def test_what_core_passes_changes_nothing():
    model, tokens = small_model(), documents()
    mask, positions = masks_and_positions(tokens)
    expected = model(tokens)
    assert torch.equal(model(tokens, positions, mask), expected)
    assert torch.equal(model(tokens, positions[:1], mask[:1]), expected)
    assert torch.equal(model(tokens, positions[0].int(), None), expected)


def separately(model, tokens):
    """Logits of each document alone, in the place of its tokens."""
    rows = [row.split(ends) for row, ends in zip(tokens, ([5, 7], [8, 4]))]
    return torch.stack([torch.cat([model(part[None])[0] for part in row]) for row in rows])


@torch.no_grad()
@pytest.mark.parametrize("pattern", [ALL_MIXERS, "K", "S", "C", "L", "+", "H", "Q", "U"])
def test_documents_are_sequences_of_their_own(pattern):
    model, tokens = small_model(pattern, **OTHERS), documents()
    expected = separately(model, tokens)
    resets = {"reset_position_ids": True, "reset_attention_mask": True}
    mask, positions = masks_and_positions(tokens, **resets)
    whole_mask, whole_positions = masks_and_positions(tokens)
    for said in ((positions, mask), (positions, None), (None, mask), (whole_positions, mask)):
        torch.testing.assert_close(model(tokens, *said), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens, whole_positions, whole_mask), expected, atol=1e-3)


def moved(token, value):
    return torch.arange(12).index_fill(0, torch.tensor(token), value)


def hiding(row, token, hidden):
    mask, _ = masks_and_positions(documents(), reset_attention_mask=True)
    mask[row, 0, token, hidden] = True
    return mask


FORM = r"it must be torch.bool \[2, 1, 12, 12\]"


@pytest.mark.parametrize(
    ("positions", "mask", "message"),
    [
        (moved(5, 3), None, "have 3 for token 5 of row 0.*as packed_seq_params"),
        (moved(0, 4), None, "have 4 for token 0 of row 0"),
        (torch.zeros(12, 2).long(), None, r"shape \[12, 2\]; the tokens have \[2, 12\]"),
        (None, hiding(1, 7, 2), "hides token 2 of row 1 from token 7"),
        (None, torch.zeros(1, 1, 12, 12).bool(), "shows token 1 of row 0 to token 0"),
        (None, torch.zeros(2, 1, 12, 12), FORM),
        (None, torch.ones(2, 12).bool(), FORM),
    ],
)
def test_what_tells_of_no_documents_is_refused(positions, mask, message):
    with pytest.raises(ValueError, match=message):
        small_model()(documents(), positions, mask)


def test_positions_and_a_mask_that_contradict_are_refused():
    tokens = documents()
    mask, positions = masks_and_positions(tokens, reset_position_ids=True)
    with pytest.raises(ValueError, match="restart at token 5 of row 0, but attention_mask shows"):
        small_model()(tokens, positions, mask)
    mask, _ = masks_and_positions(tokens, reset_attention_mask=True)
    with pytest.raises(ValueError, match="restart at token 5 of row 1, but attention_mask shows"):
        small_model()(tokens, positions[0], mask)


@torch.no_grad()
def test_packed_sequences_may_bring_their_own():
    model, tokens = small_model(), documents()[:1]
    packed = packed_params(0, 5, 10)  # two rows of padding
    expected = model(tokens, packed_seq_params=packed)
    for resets in (False, True):
        mask, positions = masks_and_positions(
            tokens, reset_position_ids=resets, reset_attention_mask=resets
        )
        assert torch.equal(model(tokens, positions, mask, packed_seq_params=packed), expected)
    with pytest.raises(ValueError, match="have 7 for token 5 of row 0, whose position is 0"):
        model(tokens, positions.index_fill(1, torch.tensor(5), 7), packed_seq_params=packed)


def test_an_inference_context_knows_its_positions():
    engine = tiny_engine(tiny_model("*"))
    engine.add_request(list(range(10)), greedy(3))
    engine.step()
    engine.step()
    context, model = engine.context, engine.model
    assert context.token_positions()[0] == 10
    with torch.inference_mode():
        expected = model(context.input_ids, inference_context=context)
        positions = torch.zeros_like(context.input_ids)
        positions[0, 0] = 10
        given = model(context.input_ids, positions, inference_context=context)
        assert torch.equal(given, expected)
        with pytest.raises(ValueError, match="have 0 for token 0 of row 0, whose position is 10"):
            model(context.input_ids, torch.arange(2)[None], inference_context=context)
        mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).triu(1)
        with pytest.raises(ValueError, match="inference context, which alone knows"):
            model(context.input_ids, None, mask, inference_context=context)


def test_values_of_a_known_layout_are_not_waited_for():
    layout = RaggedLayout.uniform(2, 12)
    positions = torch.zeros(2, 12, dtype=torch.long, device="meta")  # it has no values at all
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.bool, device="meta")
    check_position_ids(positions, (2, 12), layout, inference=False)
    check_attention_mask(mask, (2, 12), layout, inference=False)
    with pytest.raises(ValueError, match=r"it must be torch\.bool"):
        check_attention_mask(mask[:, 0], (2, 12), layout, inference=False)


def test_rows_that_do_not_divide_over_the_ranks_are_refused():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = SimpleNamespace(sequence_parallel=True, **sizes)
    assert row_padding(config, 2, 30, inference=False) == 0
    with pytest.raises(ValueError, match="splits the 29 tokens of each row over"):
        row_padding(config, 2, 29, inference=False)
