"""Rollouts: completions that the model draws for prompts while it is trained, as batches."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.text.document_files import check_files, read_chunks
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.data.config import parse_blend
from megatron_hybrid.training.recipe import Recipe


class Prompts:
    """The records of files, and the tokens of their prompts.

    Raises:
        ValueError: a file or record cannot be read, or a prompt has no room in a row.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer):
        self.records: list[dict[str, Any]] = []
        self.tokens: list[list[int]] = []
        digest, size = hashlib.blake2b(digest_size=16), recipe.data.sequence_length
        room = size - recipe.grpo.max_tokens
        for path in check_files(parse_blend("train", recipe.data.train)[0]):
            for chunk in read_chunks(path):
                for index in range(len(chunk.records)):
                    try:
                        if (record := chunk.parse(index, "prompt")) is None:
                            continue
                        prompt = record["prompt"]
                        if isinstance(prompt, str):
                            tokens = tokenizer.encode(prompt)
                        else:
                            tokens, _ = tokenizer.chat_prompt(prompt, tools=record.get("tools"))
                        if not 0 < len(tokens) <= room:
                            raise ValueError(
                                f"the prompt has {len(tokens)} tokens; a row of {size} has room "
                                f"for 1 to {room} and grpo.max_tokens={recipe.grpo.max_tokens}."
                            )
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{chunk.place(index)}: {error}") from error
                    self.records.append(record)
                    self.tokens.append(tokens)
                    digest.update(repr(record).encode())
        self.unique_identifiers = {"content": digest.hexdigest()}

    def order(self, first: int, count: int, seed: int) -> list[int]:
        """Records of a part of the epochs, each of which has an order of its own."""
        size, numbers = len(self.records), range(first, first + count)
        epochs = {n // size: None for n in numbers}
        orders = {epoch: np.random.RandomState([seed, epoch]).permutation(size) for epoch in epochs}
        return [int(orders[n // size][n % size]) for n in numbers]


class Rollouts:
    """Draws groups of completions by an engine on the model's own weights.

    Args:
        model: as it is trained, with its gradients and optimizer.
        prompts: those of all ranks.

    Raises:
        ValueError: the recipe does not fit the ranks; or the reward function cannot be found.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, recipe: Recipe, prompts: Prompts):
        self.model, self.tokenizer, self.recipe, self.prompts = model, tokenizer, recipe, prompts
        self.reward = find_reward(recipe.grpo.reward)
        self.engine = DynamicInferenceEngine(
            model,
            tokenizer,
            InferenceConfig(
                cache_bytes=recipe.grpo.cache_bytes,
                max_sequence_length=recipe.data.sequence_length,
                max_requests=max(64, recipe.grpo.group_size),
            ),
        )
        self.engine.suspend("drop")
        model.train()

    def batches(self, step: int) -> Iterator[Batch]:
        """Micro-batches of this rank from a step on, without end. Completions are drawn when the
        first batch of a step is asked for, with the weights of then."""
        updates, size = self.recipe.grpo.updates, self.recipe.run.micro_batch_size
        drawn: list[dict[str, Any]] = []
        while True:
            if not drawn or step % updates == 0:
                drawn = self._draw(step // updates)
            for start in range(0, len(drawn), size):
                yield _join(drawn[start : start + size])
            step += 1

    def _draw(self, number: int) -> list[dict[str, Any]]:
        """Draw the completions of a batch of prompts. number: of the batch."""
        fields, run = self.recipe.grpo, self.recipe.run
        rank, ranks = self.engine.replica
        whole = run.global_batch_size // fields.group_size
        first = number * whole + rank * (whole // ranks)
        places = self.prompts.order(first, whole // ranks, self.recipe.data.seed)
        params = [
            SamplingParams(
                temperature=1.0,
                top_k=0,
                top_p=0.0,
                min_p=0.0,
                repetition_penalty=1.0,
                min_tokens=0,
                num_tokens_to_generate=fields.max_tokens,
                return_log_probs=True,
                skip_prompt_log_probs=True,
                detokenize_stop_sequence=True,
                seed=run.seed + first + place,
            )
            for place in range(len(places))
        ]
        self.engine.update_weights()
        self.engine.resume()
        results = self.engine.generate(
            [self.prompts.tokens[place] for place in places],
            params,
            RequestOptions(n=fields.group_size),
            progress=False,
        )
        self.engine.suspend("drop")
        self.model.train()
        samples = [sample for result in results for sample in result.samples]
        records = [
            self.prompts.records[place] for place in places for _ in range(fields.group_size)
        ]
        rewards = self._rewards(records, samples).view(-1, fields.group_size)
        advantages = rewards - rewards.mean(1, keepdim=True)
        if fields.scale_rewards:
            advantages /= rewards.std(1, keepdim=True) + 1e-4
        return [
            _row(*each)
            for each in zip(samples, advantages.flatten(), rewards.flatten(), strict=True)
        ]

    def _rewards(
        self, records: Sequence[dict[str, Any]], samples: Sequence[GenerationResult]
    ) -> torch.Tensor:
        """Ask for the rewards on the first rank of each model, fp32 [samples]."""
        group = parallel_state.get_tensor_model_parallel_group()
        found: list[Any] = [None]
        with fail_together(ValueError, whole_job=True):
            if group.rank() == 0:
                ids = [sample.token_ids for sample in samples]
                texts: list[Any] = [self.tokenizer.decode(each) for each in ids]
                for place, record in enumerate(records):
                    if not isinstance(record["prompt"], str):
                        texts[place] = [{"role": "assistant", "content": texts[place]}]
                names = {name for record in records for name in record} - {"prompt"}
                columns = {name: [record.get(name) for record in records] for name in names}
                prompts = [record["prompt"] for record in records]
                given = {"prompts": prompts, "completions": texts, "completion_ids": ids}
                found = [self.reward(**given, **columns)]
                rewards = torch.tensor(found[0], dtype=torch.float32)
                if rewards.shape != (len(samples),) or not rewards.isfinite().all():
                    raise ValueError(
                        f"grpo.reward {self.recipe.grpo.reward} returned {found[0]!r:.80}; it must "
                        f"be a list of {len(samples)} finite numbers."
                    )
        dist.broadcast_object_list(found, group=group, group_src=0)
        return torch.tensor(found[0], dtype=torch.float32)


def find_reward(name: str) -> Callable[..., Sequence[float]]:
    """Import a reward function, `module:function`.

    Raises:
        ValueError: there is none.
    """
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        function = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"grpo.reward is {name!r}; it must be module:function, of a module in {folder} or one "
            f"that is installed ({error})."
        ) from error
    if not callable(function):
        raise ValueError(f"grpo.reward is {name!r}, which is {function!r:.80}, and no function.")
    return function


def _row(sample: GenerationResult, advantage: torch.Tensor, reward: torch.Tensor) -> dict[str, Any]:
    """A completion with its prompt as a row: tokens that predict the next one."""
    ids = torch.tensor([*sample.prompt_tokens, *sample.token_ids])
    mask = (torch.arange(1, len(ids)) >= len(sample.prompt_tokens)).float()
    drawn = torch.zeros_like(mask)
    drawn[mask > 0] = torch.tensor(sample.log_probs)
    columns = {"drawn": drawn, "advantage": advantage * mask, "reward": reward * mask}
    row = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "lengths": [len(mask)]}
    return {**row, "columns": columns}


def _join(rows: Sequence[dict[str, Any]]) -> Batch:
    batch = Batch.of(rows)
    for name in rows[0]["columns"]:
        batch.columns[name] = torch.cat([row["columns"][name] for row in rows])[None]
    return batch
