"""Routes of a trainer in another process: pause, sleep, new weights. They are the operator's, and
exist only with `ServingConfig.takes_weights`. Names, bodies and answers are vLLM's, where they mean
the same."""

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Query

from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.weights.transfer import TrainerError
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.protocols import schemas
from megatron_hybrid.serving.protocols.fields import Fields
from megatron_hybrid.serving.routes import operator_routes
from megatron_hybrid.serving.service import Service


class InitFields(Fields):
    """Body of /init_weight_transfer_engine."""

    init_info: schemas.Json
    """The group of the trainer: `master_address`, `master_port`, `rank_offset` and `world_size`."""


class UpdateFields(Fields):
    """Body of /update_weights."""

    update_info: schemas.Json
    """The new weights: `path` is a folder that each rank can read; or `names`, `dtype_names` and
    `shapes` are those of the tensors that the trainer broadcasts. With `ipc_handles_pickled` each
    rank reads the tensors from its GPU's memory instead."""


class FinishFields(Fields):
    """Body of /finish_weight_update."""

    weight_version: str | None = None
    """A name for the new weights, which /weight_info returns."""


Mode = Annotated[
    Literal["abort", "wait", "keep"],
    Query(
        description="What happens to running requests: abort ends them with the tokens that they "
        "have, wait lets them end first, keep continues them after /resume."
    ),
]
Tags = Annotated[
    list[Literal["weights", "kv_cache", "scheduling"]] | None,
    Query(description="The parts to wake up. By default all wake up."),
]
ClearCache = Annotated[
    bool, Query(description="Whether the cache is emptied. With keep it has no effect.")
]
Level = Annotated[
    int,
    Query(
        ge=0,
        le=2,
        description="What is given back: 0 nothing, 1 the memory of the cache and of the weights, "
        "which stay in host memory, 2 the weights as well: the trainer sends them all again.",
    ),
]
KeepCache = Annotated[
    Literal["drop", "host", "disk"],
    Query(
        description="Where cached prefixes stay while the server sleeps: drop keeps none, host "
        "keeps them in host memory, disk in --cache-dir."
    ),
]


def add_trainer(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    engine, version = service.engine, None
    statuses = 400, 401, 403, 409, 413, 502, 503
    routes = operator_routes(service.auth, *statuses, dependencies=[Depends(_refusals)])

    @routes.post("/pause")
    async def pause(mode: Mode = "abort", clear_cache: ClearCache = True) -> schemas.State:
        await engine.pause_generation(mode, clear_cache)
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume() -> schemas.State:
        await engine.resume_generation()
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> schemas.IsPaused:
        return {"is_paused": await engine.is_paused()}

    @routes.post("/sleep")
    async def sleep(
        level: Level = 1, mode: Mode = "abort", keep_cache: KeepCache = "drop"
    ) -> schemas.State:
        await engine.sleep(level, mode, keep_cache)
        return {"status": "sleeping" if level else "paused"}

    @routes.post("/wake_up")
    async def wake_up(tags: Tags = None) -> schemas.State:
        await engine.wake_up(tags)
        return {"status": "sleeping" if await engine.is_sleeping() else "awake"}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> schemas.IsSleeping:
        return {"is_sleeping": await engine.is_sleeping()}

    @routes.post("/init_weight_transfer_engine")
    async def init(fields: InitFields) -> schemas.Done:
        await engine.init_weight_transfer_engine(fields.init_info)
        return {"message": "Weight transfer initialized"}

    @routes.post("/start_weight_update")
    async def start() -> schemas.Done:
        await engine.start_weight_update()
        return {"message": "Weight update started"}

    @routes.post("/update_weights")
    async def update(fields: UpdateFields) -> schemas.Done:
        await engine.receive_weights(fields.update_info)
        return {"message": "Weights updated"}

    @routes.post("/finish_weight_update")
    async def finish(fields: FinishFields | None = None) -> schemas.UpdateDone:
        nonlocal version
        await engine.finish_weight_update()
        version = None if fields is None else fields.weight_version
        return {"message": "Weight update finished", "weight_epoch": await engine.epoch()}

    @routes.get("/weight_info")
    async def weight_info() -> schemas.WeightInfo:
        unfinished, epoch = await engine.unfinished_weights(), await engine.epoch()
        named = version if unfinished is None else None
        return {"weight_version": named, "weight_epoch": epoch, "unfinished": unfinished}

    @routes.get("/get_world_size")
    async def world_size() -> schemas.WorldSize:
        return {"world_size": engine.num_ranks}

    app.include_router(routes)


async def _refusals() -> AsyncIterator[None]:
    """Turn the engine's errors into ApiErrors, for all routes."""
    try:
        yield
    except (TypeError, ValueError, OSError) as error:  # OSError: a folder that was named
        raise ApiError(400, str(error)) from error
    except RankFailedError as error:
        raise ApiError(503, str(error)) from error
    except TrainerError as error:
        raise ApiError(502, str(error)) from error
    except (RuntimeError, MemoryError) as error:
        raise ApiError(409, str(error)) from error
