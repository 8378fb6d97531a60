"""`megatron-hybrid serve` on Ray Serve: each replica is a whole server, over one rank or several.

    cd examples/ray; serve run ray_serve.yaml

Requests that name their conversation in the header X-Session-Id go to the same replica, which has
the prefix of the next turn. `ingress.py` hands them on; see docs/guides/many_machines.md.
"""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import megatron_hybrid.compat  # isort: skip  (before megatron.core, which warns if it is first)
import megatron_hybrid as mh  # isort: skip
import ray
import torch
import torch.distributed as dist
from ingress import Call, Exchange, Ingress
from pydantic import BaseModel
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.serving.app import create_app
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.service import SAVE_SECONDS, STEP_SECONDS, Service, run_steps


class Options(BaseModel, extra="forbid"):
    """`args` of the YAML file."""

    model: str = "demo"
    """A checkpoint folder that every node has, or 'demo'."""
    tp: int = 1
    """Ranks of a replica, by tensor parallelism."""
    on_gpus: bool = False
    """Whether each rank has a GPU."""
    cpus: float = 1
    """CPUs of each rank."""
    inference: dict = {}
    """Fields of `InferenceConfig`, such as cache_bytes."""


def load(options: Options):
    """Model and tokenizer, on this process's GPU if it has one."""
    if options.tp > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.on_gpus else "gloo")
    model, tokenizer = mh.load_pretrained(
        options.model,
        device="cuda" if options.on_gpus else "cpu",
        dtype=torch.bfloat16 if options.on_gpus else torch.float32,
        mtp=options.inference.get("speculation") == "mtp",
        tensor_model_parallel_size=options.tp,
    )
    style = ServingConfig(options.model).style_of(tokenizer.template_source(()))
    tokenizer.show_special_tokens(style.marks)
    return model, tokenizer


def join(rank: int, size: int, address: str, port: int) -> None:
    """What torchrun would set. Ray shows each rank its own GPU alone."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))


@ray.remote
class Rank:
    """Another rank than the first of a replica. It ends with it."""

    def follow(self, options: Options, rank: int, address: str, port: int) -> None:
        """Do what the first rank does, until it ends."""
        join(rank, options.tp, address, port)
        with mh.DynamicInferenceEngine(
            *load(options), mh.InferenceConfig(**options.inference)
        ) as engine:
            engine.follow()


@serve.deployment
class Server:
    """A replica: the first rank, its engine, and the application in front of it."""

    async def __init__(self, options: Options):
        if options.tp > 1:
            self._start_ranks(options)
        model, tokenizer = load(options)
        config = mh.InferenceConfig(**options.inference)
        self._engine = mh.AsyncEngine(model, tokenizer, config)
        name = ServingConfig(Path(options.model).name)
        self._service = Service(self._engine, tokenizer, config, name)
        self._app, self._lifespan = create_app(self._service), AsyncExitStack()
        await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))

    def _start_ranks(self, options: Options) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = ray.util.get_node_ip_address(), probe.getsockname()[1]
        group = ray.util.get_current_placement_group()
        self._ranks = []  # they end when nobody has them any more
        for rank in range(1, options.tp):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actor = Rank.options(
                num_cpus=options.cpus, num_gpus=int(options.on_gpus), scheduling_strategy=bundle
            ).remote()
            actor.follow.remote(options, rank, *place)
            self._ranks.append(actor)
        join(0, options.tp, *place)

    async def answer(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """Answer a request. Yields messages of ASGI."""
        async for message in Exchange(self._app, call).messages():
            yield message

    async def whole(self, call: Call) -> tuple[str, dict[str, Any], bytes]:
        """Return this replica's name, and its answer: how it begins, and its body."""
        start, *rest = [message async for message in Exchange(self._app, call).messages()]
        body = b"".join(message.get("body", b"") for message in rest)
        return serve.get_replica_context().replica_tag, start, body

    def check_health(self) -> None:
        """Ray Serve asks; a replica that fails is replaced."""
        if self._engine.rank_failure is not None:
            raise RankFailedError(str(self._engine.rank_failure))

    async def __del__(self) -> None:
        """End as `serve` does: a step that fails stops no other. Ray has the last deadline."""
        await run_steps(
            ("the application's end", self._lifespan.aclose, STEP_SECONDS),
            ("the service's end", self._service.close, SAVE_SECONDS),
        )


def build(options: Options) -> serve.Application:
    """The application that the YAML file names."""
    rank = {"CPU": options.cpus} | ({"GPU": 1} if options.on_gpus else {})
    server = Server.options(
        placement_group_bundles=[rank] * options.tp,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": int(options.on_gpus)},
    )
    return Ingress.bind(server.bind(options))
