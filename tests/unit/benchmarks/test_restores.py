"""Restores of the encodings' benchmark: from exact states the same follows, from others not."""

import numpy as np
import torch
from reference import random_tokens, tiny_model

from benchmarks.restores import Restores, divergence


def test_exact_states_give_what_a_run_without_a_restore_gives():
    model = tiny_model.__wrapped__("MG*-").double()
    sequences = [np.array(random_tokens(12, seed), np.int32) for seed in range(2)]
    restores = Restores(model, sequences, [5, 8], 4)
    found = restores.log_probs(restores.states())
    for sequence, position, log_probs in zip(sequences, [5, 8], found):
        tokens = torch.from_numpy(sequence[None, : position + 4]).long()
        expected = model(tokens)[0, position:].log_softmax(-1)
        torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)
    changed = {key: state + 1 for key, state in restores.states().items()}
    assert divergence(found, restores.log_probs(changed)).min() > 0
