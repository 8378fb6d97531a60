"""The example of reinforcement learning: it learns, on exact log-probabilities and few tokens, on
one rank and on two replicas of two."""

import io
from contextlib import redirect_stdout
from unittest import mock

import pytest
import rl_rollout
import torch
from commands import free_port
from matrix import matrix_rows
from rank_processes import run_ranks, told_by_torchrun

RAN = ["on_one_rank", "on_four_ranks"]


def run_main(num_updates, *arguments):
    """What `main` prints, its updates, the samples of each, and the replicated parameters."""
    updates, samples, models = [], [], []
    run, train_step = rl_rollout.run, rl_rollout.train_step

    def noted_run(tensor_parallel):
        for update in run(num_updates, tensor_parallel):
            updates.append(update)
            yield update

    def noted_step(model, optimizer, turns):
        models[:] = [model]
        samples.append([turn.answer for turn in turns])
        return train_step(model, optimizer, turns)

    with (
        redirect_stdout(io.StringIO()) as printed,
        mock.patch.multiple(rl_rollout, run=noted_run, train_step=noted_step),
    ):
        rl_rollout.main(arguments)
    parameters = models[0].named_parameters()
    replicated = {
        name: parameter.detach()
        for name, parameter in parameters
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    return {
        "printed": printed.getvalue(),
        "updates": [vars(update) for update in updates],
        "samples": samples,
        "replicated": replicated,
    }


def run_rank(rank, size, port, folder, num_updates):
    """As torchrun starts it."""
    torch.set_num_threads(1)
    told_by_torchrun(rank, size, port)
    torch.save(run_main(num_updates, "--dp", "2"), f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, (4, free_port(), str(folder), 2), 4)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.fixture(scope="module")
def on_one_rank():
    return run_main(2)


@pytest.fixture(scope="module", params=matrix_rows(RAN, "on_one_rank"))
def ran(request):
    found = request.getfixturevalue(request.param)
    return found[0] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def updates(ran):
    return [rl_rollout.Update(**update) for update in ran["updates"]]


@pytest.mark.matrix
def test_the_reward_improves():
    rewards = [update["reward"] for update in run_main(20)["updates"]]
    assert sum(rewards[:3]) / 3 < 0.55  # chance is 0.47
    assert sum(rewards[-3:]) / 3 > 0.9


def test_rollouts_and_training_agree_on_log_probs_to_the_bit(updates):
    assert max(update.log_prob_error for update in updates) == 0


def test_a_turn_computes_what_is_new_and_nothing_of_older_weights(updates):
    for update in updates:
        prompt = len(rl_rollout.SYSTEM) + 9
        samples = rl_rollout.PROMPTS * rl_rollout.SAMPLES
        first, second = (percent / 100 * samples for percent in update.skipped_percent)
        # In each update the system prompt is computed anew, once.
        assert first * prompt <= samples * prompt - len(rl_rollout.SYSTEM) - rl_rollout.PROMPTS
        # A second turn of each sample computes the reply, of two tokens, at most.
        longer = prompt + rl_rollout.ANSWER_TOKENS + 2
        assert second * longer >= samples * (longer - 2) - 1e-6


def test_each_update_begins_an_epoch(updates):
    assert [update.epoch for update in updates] == list(range(len(updates)))


def test_a_line_of_each_update_fits_in_80_columns(ran, updates):
    *lines, last = ran["printed"].splitlines()
    assert (
        lines == [str(update) for update in updates]
        and last == "importance ratios before an update differ from 1 by at most 0"
    )
    assert all(len(line) <= 80 for line in (*lines, last))


@pytest.mark.matrix
def test_the_ranks_of_a_replica_draw_alike_and_all_learn_alike(on_four_ranks):
    first, second, *others = on_four_ranks
    for one, other in ((first, second), others):
        assert one["samples"] == other["samples"] and one["updates"] == other["updates"]
    assert first["samples"] != others[0]["samples"]
    of_own_heads = [n for n in first["replicated"] if "q_layernorm" in n or "k_layernorm" in n]
    assert len(of_own_heads) == 2
    for name, parameter in first["replicated"].items():
        assert all(torch.equal(parameter, rank["replicated"][name]) for rank in on_four_ranks), name


@pytest.mark.matrix
def test_only_the_first_rank_prints(on_four_ranks):
    first, *others = on_four_ranks
    assert first["printed"] and not any(rank["printed"] for rank in others)


def test_replicas_that_do_not_divide_the_ranks_are_refused(capsys):
    with pytest.raises(SystemExit):
        rl_rollout.main(["--dp", "2"])
    assert "--dp 2 does not divide the 1 ranks" in capsys.readouterr().err
