"""Reinforcement learning whose rollouts are drawn by servers, in other processes than the trainer.

    megatron-hybrid serve demo --port 8001 --take-weights --logprobs-mode processed_logprobs
    megatron-hybrid serve demo --port 8002 --take-weights --logprobs-mode processed_logprobs
    python examples/remote_rollouts.py http://127.0.0.1:8001 http://127.0.0.1:8002

A toy: the reward of an answer is the share of its tokens with an even id. One update: prompts as
token ids to the servers, answers as token ids with their log-probabilities and the weights that
drew them, a step of REINFORCE, and the new weights to all servers at once, by `torch.distributed`.
Requests that run meanwhile go on with the new weights.

`Workers` is all that a trainer needs of a server, with or without `--tp`; nothing else is of this
package but the model that is trained.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

import megatron_hybrid.compat  # isort: skip  (before megatron.core, which warns if it is first)
import megatron_hybrid as mh  # isort: skip
import numpy as np
import torch

from megatron_hybrid.inference.weights.transfer import WeightGroup

UPDATES, PROMPTS, SAMPLES, ANSWER_TOKENS = 10, 4, 8, 8
LEARNING_RATE = 1e-4
PART_BYTES = 64 << 20
"""Of the weights that one call to the servers announces."""


@dataclass
class Rollout:
    """An answer as a training step needs it."""

    prompt: list[int]
    answer: list[int]
    log_probs: list[float]
    epochs: list[tuple[int, int]]
    """Number of the weights, and the first token that they drew, for each change of them."""


class Workers:
    """Servers that draw rollouts with the trainer's weights.

    Args:
        urls: of the servers.
        key: of their operator, if they have one.
    """

    def __init__(self, urls: Sequence[str], key: str = ""):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._clients = [httpx.Client(base_url=url, headers=headers, timeout=600) for url in urls]
        self._threads = ThreadPoolExecutor(16 * len(urls))
        self._turn = itertools.cycle(self._clients)
        self._group: WeightGroup | None = None

    def connect(self, address: str, port: int, device: str = "cpu") -> None:
        """Make the group of this process, its rank 0, and of all ranks of all servers. address,
        port: free ones of this machine, which the servers can reach."""
        sizes = [c.get("/get_world_size").json()["world_size"] for c in self._clients]
        offsets = [1, *itertools.accumulate(sizes, initial=1)][1:]
        meeting = {"master_address": address, "master_port": port, "world_size": 1 + sum(sizes)}
        joining = self._threads.map(
            lambda client, offset: _post(
                client,
                "/init_weight_transfer_engine",
                {"init_info": {**meeting, "rank_offset": offset}},
            ),
            self._clients,
            offsets,
        )
        self._group = WeightGroup(address, port, 0, 1 + sum(sizes), device=device)
        list(joining)

    def send(self, named: Iterable[tuple[str, torch.Tensor]], version: str | None = None) -> None:
        """Give all servers new weights; they draw nothing meanwhile. named: whole tensors, by their
        names in a checkpoint. version: a name for them."""
        self._all("/start_weight_update")
        for part in _parts(named):
            info = {
                "names": [name for name, _ in part],
                "dtype_names": [str(tensor.dtype) for _, tensor in part],
                "shapes": [list(tensor.shape) for _, tensor in part],
            }
            receiving = self._begin("/update_weights", {"update_info": info})
            for name, tensor in part:
                self._group.broadcast(tensor, name)
            list(receiving)
        self._all("/finish_weight_update", {"weight_version": version})

    def pause(self, mode: str = "abort") -> None:
        """See `AsyncEngine.pause_generation`."""
        self._all(f"/pause?mode={mode}")

    def resume(self) -> None:
        """End a pause."""
        self._all("/resume")

    def generate(self, prompts: Sequence[list[int]], n: int, **fields: object) -> list[Rollout]:
        """n answers to each prompt, side by side. fields: of the request, such as `temperature`."""
        body = {"n": n, "return_token_ids": True, "logprobs": 0, **fields}
        clients = [next(self._turn) for _ in prompts]
        bodies = [{**body, "prompt": prompt} for prompt in prompts]
        groups = self._threads.map(
            lambda client, each: _post(client, "/v1/completions", each)["choices"], clients, bodies
        )
        return [
            Rollout(
                choice["prompt_token_ids"],
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                choice["weight_epochs"],
            )
            for group in groups
            for choice in group
        ]

    def close(self) -> None:
        """Leave the servers as they are."""
        if self._group is not None:
            self._group.close()
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def _begin(self, path: str, body: dict | None = None) -> Iterable[dict]:
        return self._threads.map(lambda client: _post(client, path, body), self._clients)

    def _all(self, path: str, body: dict | None = None) -> None:
        list(self._begin(path, body))


def _post(client: httpx.Client, path: str, body: dict | None = None) -> dict:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{client.base_url}{path} answers {answer.status_code}: {answer.text}")
    return answer.json()


def _parts(
    named: Iterable[tuple[str, torch.Tensor]],
) -> Iterable[list[tuple[str, torch.Tensor]]]:
    part: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        if part and sum(t.nbytes for _, t in part) + tensor.nbytes > PART_BYTES:
            yield part
            part = []
        part.append((name, tensor))
    if part:
        yield part


def train_step(
    model: mh.HybridModel, optimizer: torch.optim.Optimizer, rollouts: list[Rollout]
) -> tuple[float, float]:
    """One step of REINFORCE whose baseline is the mean of the answers to the same prompt. Returns
    the mean reward, and the largest difference between the log-probabilities of rollout and
    training."""
    rewards = torch.tensor([np.mean([token % 2 == 0 for token in r.answer]) for r in rollouts])
    groups = rewards.view(-1, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-3)
    model.train()
    tokens = torch.tensor([[*r.prompt, *r.answer] for r in rollouts])
    logits = model(tokens[:, :-1])[:, -ANSWER_TOKENS:]
    answers = tokens[:, -ANSWER_TOKENS:]
    log_probs = logits.log_softmax(dim=-1).gather(2, answers[..., None])[..., 0]
    loss = -(advantages.view(-1, 1) * log_probs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    drawn_with = torch.tensor([r.log_probs for r in rollouts])
    return rewards.mean().item(), (log_probs.detach() - drawn_with).abs().max().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="+", help="Draw rollouts from these servers of the model.")
    parser.add_argument(
        "--model", default="demo", help="Train the model in this folder. The default is demo."
    )
    parser.add_argument(
        "--address", default="127.0.0.1", help="Let servers reach the trainer at this address."
    )
    parser.add_argument("--port", type=int, default=29500, help="Listen on this free port.")
    parser.add_argument("--updates", type=int, default=UPDATES, help="Make N updates.", metavar="N")
    options = parser.parse_args(arguments)
    model, _ = mh.load_pretrained(options.model, "cpu", torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    workers = Workers(options.urls)
    workers.connect(options.address, options.port)
    random = np.random.default_rng(0)
    for number in range(options.updates):
        prompts = random.integers(300, model.config.vocab_size, (PROMPTS, 16)).tolist()
        drawn = {"max_tokens": ANSWER_TOKENS, "temperature": 1.0, "ignore_eos": True}
        rollouts = workers.generate(prompts, SAMPLES, **drawn)
        reward, error = train_step(model, optimizer, rollouts)
        workers.send(model.named_parameters(), version=str(number + 1))
        print(f"update {number:2}   reward {reward:.3f}   log-probabilities differ by {error:.1e}")
    workers.close()


if __name__ == "__main__":
    main()
