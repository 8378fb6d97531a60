"""Reinforcement learning with rollouts of two turns, on the training model's own parameters.

    python examples/rl_rollout.py                              # one process, half a minute
    torchrun --nproc-per-node 2 examples/rl_rollout.py         # tensor parallel, on GPUs or gloo
    torchrun --nproc-per-node 4 examples/rl_rollout.py --dp 2  # 2 replicas of 2 ranks

A toy: the prompt ends with LOW or HIGH, and the reward is the share of the answer's tokens in that
half of the vocabulary. The environment replies with GOOD or BAD and asks for the other half. One
update: several answers to each prompt, a second turn for each of them, and a step of REINFORCE
whose baseline is the mean of the answers to the same prompt (as GRPO).

History is token-faithful: a turn's prompt is the ids of the turns before, nothing is decoded and
encoded again. So the second turn resumes from the state at the end of the first, and the training
step sees the very tokens that were drawn, on a CPU with the same log-probabilities to the bit.

Each data-parallel replica draws for its own prompts and trains on them; gradients are averaged.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import megatron_hybrid.compat  # isort: skip  (before megatron.core, which warns if it is first)
import megatron_hybrid as mh  # isort: skip
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)

HALF = 30
LOW, HIGH, GOOD, BAD = range(2 * HALF, 2 * HALF + 4)
VOCAB_SIZE = 2 * HALF + 4
SYSTEM = [(7 * i) % (2 * HALF) for i in range(96)]  # of all prompts

UPDATES, PROMPTS, SAMPLES, ANSWER_TOKENS = 20, 8, 8, 8
TEMPERATURE, LEARNING_RATE = 1.0, 1e-2


@dataclass
class Turn:
    """A turn of a conversation, and what the training step needs of it."""

    prompt: list[int]
    answer: list[int]
    log_probs: list[float]
    """Of the answer, from the engine."""
    reward: float
    advantage: float = 0.0


@dataclass(frozen=True)
class Update:
    """Numbers of one update."""

    epoch: int
    reward: float
    """Mean of all turns."""
    skipped_percent: tuple[float, float]
    """Prompt tokens that were not computed, in the first turn and in the second."""
    log_prob_error: float
    """Largest difference between the engine's log-probabilities and those of training."""

    def __str__(self) -> str:
        first, second = self.skipped_percent
        return (
            f"epoch {self.epoch:2}   reward {self.reward:.3f}   skipped: turn 1 {first:4.1f} %, "
            f"turn 2 {second:4.1f} %"
        )


def build_model(tensor_parallel: int) -> mh.HybridModel:
    """A tiny hybrid, split over as many ranks."""
    torch.manual_seed(0)  # the ranks draw alike
    config = mh.HybridConfig(
        layer_pattern="M*-",
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=VOCAB_SIZE,
        mamba_head_dim=16,
        mamba_state_dim=16,
        mamba_num_groups=2,
        mamba_chunk_size=1,  # a row then has the same bits in rollouts and in training
        qk_layernorm=True,
        init_method_std=0.1,
        tensor_model_parallel_size=tensor_parallel,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return mh.build_hybrid_model(config)


def reward_of(answer: list[int], asked: int) -> float:
    first = 0 if asked == LOW else HALF
    return sum(first <= token < first + HALF for token in answer) / len(answer)


def rollout(engine: mh.DynamicInferenceEngine, seed: int) -> tuple[list[Turn], tuple[float, float]]:
    """Two turns for each sample of each prompt, and the % of prompt tokens skipped in each."""
    random = np.random.default_rng(seed)
    params = mh.SamplingParams(
        temperature=TEMPERATURE,
        num_tokens_to_generate=ANSWER_TOKENS,
        return_log_probs=True,
        skip_prompt_log_probs=True,  # else no prompt token could be skipped
    )
    asked = random.choice([LOW, HIGH], PROMPTS).tolist()
    prompts = [[*SYSTEM, *random.integers(0, 2 * HALF, 8).tolist(), ask] for ask in asked]
    groups = [
        result.samples for result in engine.generate(prompts, params, mh.RequestOptions(n=SAMPLES))
    ]
    first = [make_turn(sample, ask) for group, ask in zip(groups, asked) for sample in group]

    asked = [LOW + HIGH - ask for ask in asked for _ in range(SAMPLES)]
    prompts = [
        [*turn.prompt, *turn.answer, GOOD if turn.reward > 0.5 else BAD, ask]
        for turn, ask in zip(first, asked)
    ]
    results = engine.generate(prompts, params)
    second = [make_turn(result, ask) for result, ask in zip(results, asked)]

    for turns in (first, second):
        for start in range(0, len(turns), SAMPLES):
            set_advantages(turns[start : start + SAMPLES])
    samples = [sample for group in groups for sample in group]
    return first + second, (skipped_percent(samples), skipped_percent(results))


def make_turn(result: mh.GenerationResult, asked: int) -> Turn:
    answer = result.token_ids
    return Turn(result.prompt_tokens, answer, result.log_probs, reward_of(answer, asked))


def set_advantages(group: list[Turn]) -> None:
    """Rewards of the answers to one prompt, normalized."""
    rewards = np.array([turn.reward for turn in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
    for turn, advantage in zip(group, advantages):
        turn.advantage = float(advantage)


def skipped_percent(results: list[mh.GenerationResult]) -> float:
    reports = [result.prefix for result in results]
    skipped = sum(report.skipped_tokens for report in reports)
    return 100 * skipped / sum(report.prompt_tokens for report in reports)


def answer_log_probs(model: mh.HybridModel, turns: list[Turn]) -> torch.Tensor:
    """Log-probabilities of the answers' tokens [turns, ANSWER_TOKENS] in a training forward."""
    length = max(len(turn.prompt) for turn in turns) + ANSWER_TOKENS
    # Padding at the right has no effect on the tokens before it.
    rows = [[*turn.prompt, *turn.answer] for turn in turns]
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    starts = torch.tensor([len(turn.prompt) for turn in turns])
    at = starts[:, None] + torch.arange(ANSWER_TOKENS)
    row = torch.arange(len(turns))[:, None]
    device = next(model.parameters()).device
    # Each rank has the logits of a part of the vocabulary, and gathers those of the others.
    logits = model(tokens.to(device), runtime_gather_output=True).cpu()
    scores = logits[row, at - 1]
    scores = (scores - scores.amax(-1, keepdim=True)) / TEMPERATURE  # in this order, as the engine
    log_probs = scores.log_softmax(dim=-1)
    return log_probs.gather(2, tokens[row, at][..., None])[..., 0]


def sum_partial_gradients(model: mh.HybridModel) -> None:
    """Sum the gradients of replicated parameters that each tensor-parallel rank applies to its own
    heads or rows only: here, the norms of queries and keys. A model in core's
    DistributedDataParallel has it from core's `finalize_model_grads`, which does this, too."""
    tp = model.pg_collection.tp
    if tp.size() > 1:
        model.ddp_config = DistributedDataParallelConfig()
        _allreduce_non_tensor_model_parallel_grads([model], model.config, tp)


def average_over_replicas(model: mh.HybridModel) -> None:
    """Average the gradients of data-parallel replicas, as core's DistributedDataParallel does."""
    dp = model.pg_collection.dp
    if dp.size() > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=dp)
            parameter.grad /= dp.size()


def train_step(model: mh.HybridModel, optimizer: torch.optim.Optimizer, turns: list[Turn]) -> float:
    """One step of policy gradient. Returns the largest difference between the log-probabilities of
    rollout and training."""
    model.train()
    log_probs = answer_log_probs(model, turns)
    advantages = torch.tensor([turn.advantage for turn in turns])
    loss = -(advantages[:, None] * log_probs).mean()
    optimizer.zero_grad()
    loss.backward()
    sum_partial_gradients(model)
    average_over_replicas(model)
    optimizer.step()
    drawn_with = torch.tensor([turn.log_probs for turn in turns])
    return (log_probs.detach() - drawn_with).abs().max().item()


def run(updates: int = UPDATES, tensor_parallel: int = 1) -> Iterator[Update]:
    """Train, and yield the numbers of each update, of the prompts of this replica."""
    model = build_model(tensor_parallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    config = mh.InferenceConfig(
        cache_bytes=32 << 20,
        max_sequence_length=256,
        # Of the distribution that is drawn from, whatever the temperature.
        logprobs_mode="processed_logprobs",
    )
    with mh.DynamicInferenceEngine(model, None, config) as engine:
        replica, replicas = engine.replica
        for number in range(updates):
            turns, skipped = rollout(engine, seed=number * replicas + replica)
            epoch = engine.epoch
            engine.suspend("drop")  # the cache's memory is the training step's
            error = train_step(model, optimizer, turns)
            engine.update_weights()
            engine.resume()
            reward = float(np.mean([turn.reward for turn in turns]))
            yield Update(epoch, reward, skipped, error)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dp",
        type=int,
        default=1,
        help="Run N data-parallel replicas. The default is 1.",
        metavar="N",
    )
    replicas = parser.parse_args(arguments).dp
    launched, world = "LOCAL_RANK" in os.environ, int(os.environ.get("WORLD_SIZE", 1))
    if replicas < 1 or world % replicas:
        parser.error(f"--dp {replicas} does not divide the {world} ranks; choose one that does")
    tensor_parallel = world // replicas
    if launched:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    prints = int(os.environ.get("RANK", 0)) == 0
    error = 0.0
    for update in run(tensor_parallel=tensor_parallel):
        error = max(error, update.log_prob_error)
        if prints:
            print(update, flush=True)
    if prints:
        error = math.expm1(error)
        print(f"importance ratios before an update differ from 1 by at most {error:.2g}")
    if launched:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
