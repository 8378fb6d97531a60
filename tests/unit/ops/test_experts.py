"""Routed experts against a loop over tokens in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_hybrid.ops import ExpertPairs, expert_mlps

TOKENS, EXPERTS, CHOSEN, HIDDEN, WIDTH = 13, 6, 3, 16, 10


def draw(tokens=TOKENS):
    """Tokens, weights and chosen experts, and the layers of all experts."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    # Never the last expert.
    order = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(1)
    chosen.scatter_(1, order[:, :CHOSEN], True)
    layers = normal(EXPERTS, WIDTH, HIDDEN), normal(EXPERTS, WIDTH)
    layers += normal(EXPERTS, HIDDEN, WIDTH), normal(EXPERTS, HIDDEN)
    return normal(tokens, HIDDEN), normal(tokens, EXPERTS), chosen, layers


def mixed(hidden, weights, chosen, layers, experts):
    """The sums over the pairs with some of the experts."""
    pairs = ExpertPairs(chosen, CHOSEN, experts)
    own = [layer[experts.start : experts.stop] for layer in layers]
    counts = pairs.counts_E.tolist()
    outputs = expert_mlps(pairs.tokens(hidden), counts, *own, torch.relu)
    return pairs.sum(outputs * pairs.weights(weights))


def looped(hidden, weights, chosen, layers, experts):
    fc1, bias1, fc2, bias2 = (layer.double() for layer in layers)
    rows = []
    for x, w, chooses in zip(hidden.double(), weights.double(), chosen):
        row = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in experts:
            if chooses[e]:
                row += w[e] * (fc2[e] @ torch.relu(fc1[e] @ x + bias1[e]) + bias2[e])
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("has_dropped", [False, True])
@pytest.mark.parametrize("experts", [range(6), range(3), range(2, 5), range(5, 6)])
def test_sums_over_all_and_over_some_experts(experts, has_dropped):
    given = draw()
    if has_dropped:
        chosen = given[2]
        chosen &= torch.rand(chosen.shape, generator=torch.Generator().manual_seed(3)) < 0.6
        chosen[4] = False
        assert set(chosen.sum(1).tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(
        mixed(*given, experts).double(), looped(*given, experts), atol=2e-5, rtol=1e-5
    )


def test_parts_of_ranks_add_up():
    given = draw()
    parts = [mixed(*given, range(at, at + 2)) for at in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), mixed(*given, range(6)), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "experts"), [(TOKENS, range(5, 6)), (0, range(6))])
def test_experts_without_rows_get_gradients_of_zero(tokens, experts):
    hidden, weights, chosen, layers = draw(tokens)
    layers = [layer.requires_grad_() for layer in layers]
    output = mixed(hidden, weights, chosen, layers, experts)
    assert output.shape == (tokens, HIDDEN)
    assert not output.any()
    output.sum().backward()
    assert all(layer.grad is not None and not layer.grad.any() for layer in layers)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("experts", [range(6), range(2, 5)])
def test_gradients_in_float64(experts, has_biases):
    hidden, weights, chosen, layers = draw(5)
    chosen[0] = False  # dropped
    inputs = [x.double().requires_grad_() for x in (hidden, weights, *layers)]

    def summed(hidden, weights, *layers):
        fc1, bias1, fc2, bias2 = (layer[experts.start : experts.stop] for layer in layers)
        biases = (bias1, bias2) if has_biases else (None, None)
        pairs = ExpertPairs(chosen, CHOSEN, experts)
        outputs = expert_mlps(
            pairs.tokens(hidden), pairs.counts_E.tolist(), fc1, biases[0], fc2, biases[1], F.silu
        )
        return pairs.sum(outputs * pairs.weights(weights))

    assert torch.autograd.gradcheck(summed, inputs)


def test_a_parameter_per_expert_is_as_a_stack():
    hidden, _, chosen, layers = draw()
    pairs = ExpertPairs(chosen, CHOSEN)
    rows, counts = pairs.tokens(hidden), pairs.counts_E.tolist()
    apart = [list(layer) for layer in layers]
    assert torch.equal(
        expert_mlps(rows, counts, *apart, torch.relu),
        expert_mlps(rows, counts, *layers, torch.relu),
    )
