"""Rollouts: completions that the model draws for prompts while it is trained, as batches."""

import copy
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pkgutil import resolve_name
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.text.document_encoder import chat_variables
from megatron_hybrid.text.document_files import BrokenRecordError, Chunk, check_files, read_chunks
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.data.config import parse_blend
from megatron_hybrid.training.recipe import Recipe

_SAMPLING = {
    **{"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"return_log_probs": True, "skip_prompt_log_probs": True, "detokenize_stop_sequence": True},
    "min_tokens": 0,
}
"""Settings that draw from the model's own distribution, whatever generation_config.json says."""

Prompt = tuple[str, dict[str, Any], list[int]]
"""A prompt's file and line, its record, and its tokens."""


class Prompts:
    """The records of files with the tokens of their prompts, and the function that rewards them.

    Raises:
        ValueError: a file or record cannot be read, a prompt does not fit into a row, or there is
            no such function.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer):
        self.reward = _find_reward(recipe.grpo.reward)
        digest, size = hashlib.blake2b(digest_size=16), recipe.data.sequence_length
        files = check_files(parse_blend("train", recipe.data.train)[0])
        chunks = (chunk for path in files for chunk in read_chunks(path))
        self.found = [each for chunk in chunks for each in _prompts_of(chunk, tokenizer)]
        for place, record, tokens in self.found:
            if not tokens or len(tokens) + recipe.grpo.max_tokens > size:
                raise ValueError(
                    f"{place}: the prompt has {len(tokens)} tokens, and grpo.max_tokens is "
                    f"{recipe.grpo.max_tokens}; a prompt must have 1 or more, and a row of "
                    f"data.sequence_length={size} must hold both."
                )
            digest.update(repr(record).encode())
        if not self.found:
            raise ValueError(f"{recipe.data.train} have no prompts: name files in data.train.")
        self.unique_identifiers = {"content": digest.hexdigest()}

    def at(self, number: int, seed: int) -> Prompt:
        """Return the prompt at a place in endless epochs, each in an order of its own."""
        epoch, place = divmod(number, len(self.found))
        return self.found[np.random.RandomState([seed, epoch]).permutation(len(self.found))[place]]


class Rollouts:
    """Draws groups of completions by an engine on the model's own weights.

    Args:
        model: the model that is trained, with its gradients and optimizer.
        prompts: those of all ranks.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, recipe: Recipe, prompts: Prompts):
        self.model, self.tokenizer, self.recipe, self.prompts = model, tokenizer, recipe, prompts
        sizes = {
            "cache_bytes": recipe.grpo.cache_bytes,
            "max_sequence_length": recipe.data.sequence_length,
            "max_requests": max(64, recipe.grpo.group_size),
        }
        self.engine = DynamicInferenceEngine(model, tokenizer, InferenceConfig(**sizes))
        self.engine.suspend("drop")
        model.train()

    def batches(self, step: int) -> Iterator[Batch]:
        """Yield micro-batches of this rank from a step on, without end. Completions are drawn when
        the first batch of a step is asked for, with the weights at that time."""
        updates, size = self.recipe.grpo.updates, self.recipe.run.micro_batch_size
        rows: list[dict[str, Any]] = []
        while True:
            if not rows or step % updates == 0:
                rows = self._draw(step // updates)
            for start in range(0, len(rows), size):
                yield Batch.of(rows[start : start + size])
            step += 1

    def _draw(self, number: int) -> list[dict[str, Any]]:
        """Draw the completions of the batch of prompts with this number, as rows."""
        fields, run, data = self.recipe.grpo, self.recipe.run, self.recipe.data
        rank, ranks = self.engine.replica
        own = run.global_batch_size // fields.group_size // ranks
        numbers = range((number * ranks + rank) * own, (number * ranks + rank + 1) * own)
        prompts = [self.prompts.at(each, data.seed) for each in numbers]
        length = fields.max_tokens
        params = [
            SamplingParams(**_SAMPLING, num_tokens_to_generate=length, seed=run.seed + each)
            for each in numbers
        ]
        self.engine.update_weights()
        self.engine.resume()
        options = RequestOptions(n=fields.group_size)
        tokens = [each for _, _, each in prompts]
        results = self.engine.generate(tokens, params, options, progress=False)
        self.engine.suspend("drop")
        self.model.train()
        samples = [sample for result in results for sample in result.samples]
        of_samples = [prompt for prompt in prompts for _ in range(options.n)]
        rewards = self._rewards(of_samples, samples).view(-1, options.n)
        advantages = rewards - rewards.mean(1, keepdim=True)
        if fields.scale_rewards:
            advantages /= rewards.std(1, keepdim=True) + 1e-4
        return list(map(_row, samples, advantages.flatten(), rewards.flatten()))

    def _rewards(self, prompts: Sequence[Prompt], samples: Sequence[GenerationResult]) -> Tensor:
        """Ask for the rewards on the first rank of each model, fp32 [samples]."""
        group, found = parallel_state.get_tensor_model_parallel_group(), [None]
        with fail_together(ValueError, whole_job=True):
            if group.rank() == 0:
                rewards = self._ask(prompts, samples)
                try:
                    found = [torch.tensor(rewards, dtype=torch.float32)]
                except (ValueError, TypeError, RuntimeError):  # whatever it is
                    found = [torch.empty(0)]
                if found[0].shape != (len(samples),) or not found[0].isfinite().all():
                    raise ValueError(
                        f"grpo.reward {self.recipe.grpo.reward} returned {rewards!r:.80}; it must "
                        f"be a list of {len(samples)} finite numbers."
                    )
        dist.broadcast_object_list(found, group=group, group_src=0)
        return found[0]

    def _ask(self, prompts: Sequence[Prompt], samples: Sequence[GenerationResult]) -> Any:
        """Call the function with copies, which it may change. If it fails, the ValueError names the
        first sample for which it fails alone."""
        ids = [[*sample.token_ids] for sample in samples]
        texts: list[Any] = list(map(self.tokenizer.decode, ids))
        records = [copy.deepcopy(record) for _, record, _ in prompts]
        for place, record in enumerate(records):
            if not isinstance(record["prompt"], str):
                texts[place] = [{"role": "assistant", "content": texts[place]}]
        names = {name for _, record, _ in self.prompts.found for name in record} - {"prompt"}
        columns = {name: [record.get(name) for record in records] for name in names}
        columns["prompts"] = [record["prompt"] for record in records]
        columns |= {"completions": texts, "completion_ids": ids}
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # whatever the function sets
                return self.prompts.reward(**columns)
        except Exception as error:
            for pair in zip(prompts, samples) if len(prompts) > 1 else ():
                self._ask(*([each] for each in pair))
            frame = extract_tb(error.__traceback__)[:2][-1]
            raise ValueError(
                f"grpo.reward {self.recipe.grpo.reward} raised {error!r} ({frame.filename}:"
                f"{frame.lineno}); rows in the call: {len(prompts)}, the first is of "
                f"{prompts[0][0]}, {self.tokenizer.decode(samples[0].token_ids)!r:.80}."
            ) from error


def _prompts_of(chunk: Chunk, tokenizer: Tokenizer) -> Iterator[Prompt]:
    for index in range(len(chunk.records)):
        place = chunk.place(index)
        try:
            if (record := chunk.parse(index, "prompt")) is None:
                continue
            prompt = record["prompt"]
            if isinstance(prompt, str):
                tokens = tokenizer.encode(prompt)
            elif not isinstance(prompt, list):
                raise BrokenRecordError(f"the prompt is {prompt!r:.80}, no text and no messages")
            else:
                tokens, _ = tokenizer.chat_prompt(prompt, **chat_variables(record))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from error
        yield place, record, tokens


def _find_reward(name: str) -> Callable[..., Sequence[float]]:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # whatever the module sets
            reward = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        reward, reason = None, error
    else:
        reason = f"that is {reward!r:.80}"
    if not callable(reward):
        raise ValueError(
            f"grpo.reward is {name!r}; it must be module:function, of a module in {folder} or one "
            f"that is installed ({reason})."
        )
    return reward


def _row(sample: GenerationResult, advantage: Tensor, reward: Tensor) -> dict[str, Any]:
    """Return a completion with its prompt as a row: tokens, and their next ones as labels."""
    ids = torch.tensor([*sample.prompt_tokens, *sample.token_ids])
    mask = (torch.arange(1, len(ids)) >= len(sample.prompt_tokens)).float()
    drawn = torch.zeros_like(mask)
    drawn[mask > 0] = torch.tensor(sample.log_probs)
    columns = {"drawn": drawn, "advantage": advantage * mask, "reward": reward * mask}
    row = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "lengths": [len(mask)]}
    return {**row, "columns": columns}
