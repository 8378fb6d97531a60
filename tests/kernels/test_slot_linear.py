"""Products by slots against the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import seeded

from megatron_hybrid.ops import dispatch


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    inputs=st.sampled_from([1, 3, 130, 300]),
    outputs=st.sampled_from([1, 5, 70]),
    slots=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_each_row_has_the_matrix_of_its_slot(rows, inputs, outputs, slots, seed):
    generator = seeded(seed)
    x = torch.randn(rows, inputs + 2, generator=generator)[:, 1:-1]
    weights = torch.randn(slots, outputs, inputs, generator=generator)
    of_rows = torch.randint(-1, slots, (rows,), generator=generator)
    op = dispatch.OPS["slot_linear"]
    assert op.refusals(x, weights, of_rows)["triton"] is None
    found = op.backends[0].run(x, weights, of_rows)
    torch.testing.assert_close(found, op.reference(x, weights, of_rows), atol=1e-4, rtol=1e-5)
    for row, slot in enumerate(of_rows.tolist()):  # of no other row
        alone = op.backends[0].run(x[row : row + 1], weights, of_rows[row : row + 1])
        assert torch.equal(alone[0], found[row])
        assert slot >= 0 or not found[row].any()
