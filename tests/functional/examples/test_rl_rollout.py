"""The example of reinforcement learning: it learns, on exact log-probabilities and few tokens."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cpu_seam import run_ranks
from megatron.core import parallel_state

EXAMPLE = Path(__file__).parents[3] / "examples" / "rl_rollout.py"
RANKS = 2


@cache
def example():
    spec = importlib.util.spec_from_file_location("rl_rollout", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def two_updates_on_a_rank():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    return [vars(update) for update in example().run(2)]


@pytest.fixture(scope="module")
def updates():
    return list(example().run())


def test_the_reward_improves(updates):
    assert len(updates) == 20
    rewards = [update.reward for update in updates]
    assert sum(rewards[:3]) / 3 < 0.55  # chance is 0.47
    assert sum(rewards[-3:]) / 3 > 0.9


def test_rollouts_and_training_agree_on_log_probs(updates):
    assert max(update.log_prob_error for update in updates) < 1e-5


def test_a_turn_computes_what_is_new_and_nothing_of_older_weights(updates):
    module = example()
    for update in updates:
        prompt, samples = len(module.SYSTEM) + 9, module.PROMPTS * module.SAMPLES
        first, second = (percent / 100 * samples for percent in update.skipped_percent)
        # In each update the system prompt is computed anew, once.
        assert first * prompt <= samples * prompt - len(module.SYSTEM) - module.PROMPTS
        # A second turn of each sample computes the reply, of two tokens, at most.
        longer = prompt + module.ANSWER_TOKENS + 2
        assert second * longer >= samples * (longer - 2) - 1e-6


def test_each_update_begins_an_epoch(updates):
    assert [update.epoch for update in updates] == list(range(20))


def test_lines_fit_in_80_columns(updates):
    assert all(len(str(update)) <= 80 for update in updates)


def test_two_ranks_agree(tmp_path):
    first, second = (result for result, _ in run_ranks(two_updates_on_a_rank, RANKS, tmp_path))
    assert first == second and len(first) == 2
    assert [update["epoch"] for update in first] == [0, 1]
    assert max(update["log_prob_error"] for update in first) < 1e-5
    assert torch.tensor([update["skipped_percent"] for update in first]).min() > 90
