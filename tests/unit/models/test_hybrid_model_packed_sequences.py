"""Packed sequences are computed as if each were alone: nothing crosses a boundary."""

import pytest
import torch
from small_models import ALL_MIXERS, ONE_OF_EACH, packed_params, random_tokens, small_model

LENGTHS = (5, 1, 17, 1, 8)
EXPERTS = {"num_moe_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
FIELDS = {
    "L": {"attention_chunk_size": 6},
    "P": {"per_layer_input_size": 10},
    "U": {"residual_rank": 5},
    "E": EXPERTS,
    "B": EXPERTS,
}
"""Fields that a layer kind needs beside those of `small_model`."""


def assert_close(found, expected):
    """Within 1e-6 of the largest number."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=1e-6 * scale, rtol=0)


@pytest.mark.parametrize("pattern", [*ONE_OF_EACH, ALL_MIXERS, "*PZEL-Z"])
def test_packed_equals_separate(pattern):
    """Logits and gradients, of each layer kind. In double precision, though where the layers
    compute in fp32 its rounding is left."""
    fields = {name: value for symbol in pattern for name, value in FIELDS.get(symbol, {}).items()}
    model = small_model(pattern, **fields).train().double()
    tokens = random_tokens(1, sum(LENGTHS) + 1)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    params = packed_params(0, 5, 6, 23, 24, 32)
    packed = model(inputs, packed_seq_params=params)
    assert_close(packed, torch.cat([model(part) for part in inputs.split(LENGTHS, 1)], 1))

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    packed = gradients(model(inputs, labels=labels, packed_seq_params=params).sum())
    separate = gradients(
        sum(
            model(x, labels=y).sum()
            for x, y in zip(inputs.split(LENGTHS, 1), labels.split(LENGTHS, 1))
        )
    )
    for name, gradient in packed.items():
        assert_close(gradient, separate[name])


def test_rows_after_the_last_boundary_do_not_matter():
    model = small_model()
    tokens = random_tokens(1, 24)
    params = packed_params(0, 9, 20)
    expected = model(tokens[:, :20], packed_seq_params=params)
    tokens[:, 20:] = 0
    torch.testing.assert_close(
        model(tokens, packed_seq_params=params)[:, :20], expected, atol=1e-5, rtol=1e-5
    )


def test_padded_boundaries_win():
    """As in core: rows that pad a sequence belong to it, so the next one starts at its own row."""
    model = small_model()
    tokens = random_tokens(1, 24)
    logits = model(tokens, packed_seq_params=packed_params(0, 9, 20, padded=[0, 12, 24]))
    expected = model(tokens[:, 12:])
    torch.testing.assert_close(logits[:, 12:], expected, atol=1e-5, rtol=1e-5)


def test_empty_sequences_are_left_out():
    model = small_model()
    tokens = random_tokens(1, 12)
    logits = model(tokens, packed_seq_params=packed_params(0, 0, 5, 5, 12))
    expected = model(tokens, packed_seq_params=packed_params(0, 5, 12))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("rows", "bad", "message"),
    [(1, bad, "must rise from 0 to at most the 12 tok") for bad in ([1, 5], [0, 8, 5], [0, 5, 13])]
    + [(2, [0, 12], r"input_ids has 2 rows. Flatten the batch to \[1, T\]")],
)
def test_bad_boundaries_are_refused(rows, bad, message):
    with pytest.raises(ValueError, match=message):
        small_model("M")(random_tokens(rows, 12), packed_seq_params=packed_params(*bad))
