"""Packed sequences are computed as if each were alone: nothing crosses a boundary."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from small_models import ALL_MIXERS, random_tokens, small_model

LENGTHS = (5, 1, 17, 1, 8)


def packed_params(boundaries, padded=None):
    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32)

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=tensor(boundaries),
        cu_seqlens_kv=tensor(boundaries),
        cu_seqlens_q_padded=tensor(padded),
        cu_seqlens_kv_padded=tensor(padded),
    )


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


@pytest.mark.parametrize("pattern", [*"MGSC*W-", ALL_MIXERS])
def test_packed_equals_separate(pattern):
    model = small_model(pattern)
    tokens = random_tokens(1, sum(LENGTHS))
    packed = model(tokens, packed_seq_params=packed_params(boundaries(LENGTHS)))
    separate = [model(part) for part in tokens.split(LENGTHS, 1)]
    torch.testing.assert_close(packed, torch.cat(separate, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", [*"MGSC*W-", ALL_MIXERS])
def test_packed_gradients_equal_separate_ones(pattern):
    model = small_model(pattern).train()
    tokens = random_tokens(1, sum(LENGTHS) + 1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    params = packed_params(boundaries(LENGTHS))
    packed = gradients(model(inputs, labels=labels, packed_seq_params=params).sum())
    separate = gradients(
        sum(
            model(x, labels=y).sum()
            for x, y in zip(inputs.split(LENGTHS, 1), labels.split(LENGTHS, 1))
        )
    )
    for name, gradient in packed.items():
        scale = separate[name].abs().max()
        torch.testing.assert_close(gradient, separate[name], atol=2e-5 * scale, rtol=1e-4)


def test_batch_rows_are_separate_sequences():
    model = small_model()
    tokens = random_tokens(3, 20)
    rows = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(model(tokens), rows, atol=1e-5, rtol=1e-5)


def test_rows_after_the_last_boundary_do_not_matter():
    model = small_model()
    tokens = random_tokens(1, 24)
    params = packed_params([0, 9, 20])
    expected = model(tokens[:, :20], packed_seq_params=params)
    tokens[:, 20:] = 0
    torch.testing.assert_close(
        model(tokens, packed_seq_params=params)[:, :20], expected, atol=1e-5, rtol=1e-5
    )


def test_padded_boundaries_win():
    """As in core: rows that pad a sequence belong to it, so the next one starts at its own row."""
    model = small_model()
    tokens = random_tokens(1, 24)
    logits = model(tokens, packed_seq_params=packed_params([0, 9, 20], padded=[0, 12, 24]))
    expected = model(tokens[:, 12:])
    torch.testing.assert_close(logits[:, 12:], expected, atol=1e-5, rtol=1e-5)


def test_empty_sequences_are_left_out():
    model = small_model()
    tokens = random_tokens(1, 12)
    logits = model(tokens, packed_seq_params=packed_params([0, 0, 5, 5, 12]))
    expected = model(tokens, packed_seq_params=packed_params([0, 5, 12]))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("bad", [[1, 5], [0, 8, 5], [0, 5, 13]])
def test_bad_boundaries_are_refused(bad):
    with pytest.raises(ValueError, match="must rise from 0 to at most the 12 tokens"):
        small_model("M")(random_tokens(1, 12), packed_seq_params=packed_params(bad))


def test_packed_rows_must_be_one():
    with pytest.raises(ValueError, match=r"input_ids has 2 rows. Flatten the batch to \[1, T\]"):
        small_model("M")(random_tokens(2, 12), packed_seq_params=packed_params([0, 12]))
