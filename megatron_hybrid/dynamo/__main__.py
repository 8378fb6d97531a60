"""A worker of NVIDIA Dynamo over one `AsyncEngine`: python -m megatron_hybrid.dynamo MODEL

Dynamo's frontend speaks HTTP, writes chats, tokenizes and detokenizes, and sends each prompt to one
of its workers; docs/guides/many_machines.md shows how they are started. The options of a request,
its limits, its guides and the end are those of `megatron-hybrid serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

try:
    from dynamo._core import Client, Context, Endpoint, get_tool_parser_names
    from dynamo.common.configuration.groups.runtime_args import (
        DynamoRuntimeArgGroup,
        DynamoRuntimeConfig,
    )
    from dynamo.common.utils.endpoint_types import parse_endpoint_types
    from dynamo.common.utils.graceful_shutdown import get_grace_period_seconds
    from dynamo.common.utils.runtime import create_runtime, parse_endpoint
    from dynamo.llm import (
        FpmEventSubscriber,
        KvEventPublisher,
        ModelInput,
        ModelRuntimeConfig,
        WorkerMetricsPublisher,
        WorkerType,
        register_model,
        unregister_model,
    )
    from dynamo.llm.exceptions import Cancelled, EngineShutdown, InvalidArgument, Unknown
    from dynamo.runtime.logging import configure_dynamo_logging

    from megatron_hybrid.serving.kv_publisher import KvPublisher
except ImportError as error:
    raise ImportError(
        f"{error}: a worker of Dynamo needs pip install -e '.[dynamo]', and then "
        "pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1"
    ) from error

from megatron_hybrid.checkpoints.pretrained import model_folder
from megatron_hybrid.cli import reported
from megatron_hybrid.commands.arguments import (
    SERVER,
    CommandParser,
    add_engine,
    add_field,
    add_served_engine,
    load_for_chats,
    read_text,
    served_config,
)
from megatron_hybrid.commands.layout import add_layout, run_on_ranks, sizes_of
from megatron_hybrid.commands.serve import SETTINGS
from megatron_hybrid.dynamo.model_card import card_folder
from megatron_hybrid.dynamo.requests import Chunks, Json, read_request
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_response import to_cpu_thread
from megatron_hybrid.serving.parsers.choice import shown_tool_parser
from megatron_hybrid.serving.protocols.request_mapping import request_options
from megatron_hybrid.serving.run import follow, freeze_objects, run, running_service
from megatron_hybrid.serving.service import STEP_SECONDS, Service, Shutdown, run_steps
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.child_lifetime import EndSignal

logger = logging.getLogger(__name__)
PROGRAM = ("-m", "megatron_hybrid.dynamo")
_PLACE = "backend", "generate"
"""Default component and endpoint."""
_PARSER_NAMES = {"openai": "harmony", "deepseek_v31": "deepseek_v3_1"}
"""Names of Dynamo's parsers of calls, where they differ from ours."""
_WATCH_SECONDS = 0.2
_LOAD_SECONDS = 0.5
_SCRAPE_SECONDS = 5.0
_DISCOVERY_SECONDS = 2.0
"""Seconds between two checks whether discovery has this worker."""
_MOST_REGISTRATIONS = 10
"""Most registrations in a row that discovery does not show. After these the worker ends."""
_SETTLE_SECONDS = 1.0
"""Seconds for a relay to connect to the publisher of KV events, and for cards to come. A worker
waits one to three times as long, at random, before it registers: two seldom do so at once."""
_SERVING_FIELDS = ("max_waiting", "model_name", "drain_seconds")
"""Fields of ServingConfig that a worker has options for, those of `serve`."""


class HybridWorker:
    """Serves an engine at an endpoint of Dynamo's. Its interface for engines (`LLMEngine`) is not
    used: that ends an answer with its first sample.

    Args:
        service: that of the engine.
        options: those of Dynamo's workers.
        folder: has config.json and the tokenizer, for the frontend.
        publisher: publishes KV events, which Dynamo reads. With None none are published.
    """

    def __init__(
        self,
        service: Service,
        options: DynamoRuntimeConfig,
        folder: Path,
        publisher: KvPublisher | None,
    ):
        self.service, self._options = service, options
        self._folder, self._publisher = folder, publisher
        self._style = service.config.style_of(service.tokenizer.template_source(()))
        self._relay: KvEventPublisher | None = None
        self._is_lost = False  # whether it ends because discovery does not take it back

    async def serve(self, signals: EndSignal) -> None:
        """Serve until a signal of this process. Then requests run to their end.

        Raises:
            OSError: Dynamo's runtime does not start; or discovery has lost this worker, and does
                not take it back.
        """
        options = self._options
        planes = options.request_plane, options.event_plane, None, options.response_plane
        try:
            runtime, _ = create_runtime(options.discovery_backend, *planes)
        except Exception as error:  # Dynamo's errors of all kinds
            raise OSError(f"Dynamo's runtime does not start here: {error}") from error
        endpoint = runtime.endpoint(options.endpoint)
        ended, grace = asyncio.Event(), get_grace_period_seconds()
        shutdown = Shutdown(
            self.service,
            signals,
            ended.set,
            first=[
                ("no longer being ready", partial(runtime.set_health_status, False), STEP_SECONDS),
                ("leaving discovery", endpoint.unregister_endpoint_instance, STEP_SECONDS),
                ("the wait for frontends", partial(asyncio.sleep, grace), grace + 1),
            ],
            last=[("the end of Dynamo's runtime", runtime.shutdown, STEP_SECONDS)],
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, shutdown.take_signal)
        self._shutdown, self._set_ready = shutdown, runtime.set_health_status
        runtime.register_engine_route("live", self._live)
        if signals.was_sent:  # in the meantime
            return
        serving = asyncio.create_task(self._serve(endpoint))
        ending = asyncio.create_task(ended.wait())
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if shutdown.has_begun:  # whatever becomes of it
            await ending
            await run_steps(("the end of the endpoint", lambda: serving, STEP_SECONDS))
        else:
            ending.cancel()
            await serving
        if self._is_lost:
            text = "discovery does not take this worker back: start it again; and frontends, too, "
            raise OSError(text + "if the folder of discovery (DYN_FILE_KV) was removed")

    async def _serve(self, endpoint: Endpoint) -> None:
        """Offer the model at the endpoint, until the runtime ends."""
        loop, service = asyncio.get_running_loop(), self.service
        options, folder, publisher = self._options, str(self._folder), self._publisher
        config = service.engine_config
        stats = await service.engine.stats()
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self._end_relay)
            loads = WorkerMetricsPublisher()
            await loads.create_endpoint(endpoint)
            endpoint.metrics.register_prometheus_expfmt_callback(partial(self._metrics, loop))
            jobs = service.admission.trim_when_idle(), service.admission.watch()
            for job in (*jobs, self._tell_load(loads), self._watch()):
                closing.callback(asyncio.create_task(job).cancel)
            model = ModelRuntimeConfig()
            model.context_length = config.max_sequence_length
            model.total_kv_blocks = max(1, stats["pool_tokens"] // config.block_size_tokens)
            model.max_num_seqs = config.max_requests
            model.max_num_batched_tokens = config.max_tokens
            model.enable_local_indexer = options.enable_local_indexer
            model.kv_event_publishing_enabled = publisher is not None
            model.tool_call_parser = self._tool_parser(options)
            model.reasoning_parser = options.dyn_reasoning_parser
            model.exclude_tools_when_tool_choice_none = options.exclude_tools_when_tool_choice_none
            model.set_structural_tag(options.structural_tag)
            if options.dyn_default_thinking_mode is not None:
                mode = json.dumps(options.dyn_default_thinking_mode)
                model.set_engine_specific("default_thinking_mode", mode)
            name = service.config.model_name
            place = _Place(endpoint, await endpoint.client(), name, folder)
            closing.callback(place.close)

            serving: asyncio.Future[None] | None = None

            async def register() -> None:
                nonlocal serving
                await asyncio.sleep(_SETTLE_SECONDS * random.uniform(1, 3))
                if others := place.other_weights:
                    text = "%s has other weights: end %s, or give another --served-model-name"
                    logger.error(text, name, others)
                while place.other_weights and not self._shutdown.has_begun:
                    await asyncio.sleep(_DISCOVERY_SECONDS)
                if self._shutdown.has_begun:
                    return
                # Now: frontends count an instance, and send it nothing before its model is there.
                if serving is None:
                    labels = [("model", name), ("model_name", name)]
                    offered = endpoint.serve_endpoint(self.generate, metrics_labels=labels)
                    serving = asyncio.ensure_future(offered)
                else:
                    await endpoint.register_endpoint_instance()
                if publisher is not None:
                    await self._end_relay()  # the router has forgotten it
                    self._relay = KvEventPublisher(
                        endpoint,
                        kv_block_size=config.block_size_tokens,
                        zmq_endpoint=publisher.endpoint,
                        enable_local_indexer=options.enable_local_indexer,
                    )
                await register_model(
                    ModelInput.Tokens,
                    parse_endpoint_types(options.endpoint_types),
                    endpoint,
                    folder,
                    name,
                    worker_type=WorkerType.Aggregated,
                    kv_cache_block_size=config.block_size_tokens,
                    runtime_config=model,
                    custom_template_path=options.custom_jinja_template,
                )
                await asyncio.sleep(_SETTLE_SECONDS)
                if place.other_weights:  # they came at the same time: both leave, and come again
                    await unregister_model(endpoint)
                    await endpoint.unregister_endpoint_instance()
                    return
                logger.info("%s is served as %s", name, endpoint)
                if publisher is not None:
                    publisher.repeat()

            await register()
            if serving is not None:
                await asyncio.gather(serving, self._stay_in_discovery(place, register))

    def _tool_parser(self, options: DynamoRuntimeConfig) -> str | None:
        """Return the name of Dynamo's parser of calls: the one that was asked for, or that the
        template shows."""
        template = self.service.tokenizer.template_source(())
        if options.dyn_tool_call_parser is not None or template is None:
            return options.dyn_tool_call_parser
        name = shown_tool_parser(template)
        name = _PARSER_NAMES.get(name, name)
        return name if name in get_tool_parser_names() else None

    # Requests ------------------------------------------------------------------------------------

    async def generate(self, request: Mapping[str, Any], context: Context) -> AsyncIterator[Json]:
        """Yield the chunks of an answer, as Dynamo reads them.

        Raises:
            DynamoException: the request cannot be served, or not to its end.
        """
        # In a task of its own, since Dynamo may abandon this generator.
        chunks: asyncio.Queue[Json | None] = asyncio.Queue()
        task = asyncio.create_task(self._answer(request, context, chunks.put_nowait))
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        stopped.add_done_callback(lambda _: task.cancel())
        task.add_done_callback(lambda _: stopped.cancel())
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await task
        except ApiError as error:
            raise self._told(error) from error
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Cancelled("the request was cancelled") from None
        finally:
            task.cancel()

    async def _answer(
        self, request: Mapping[str, Any], context: Context, put: Callable[[Json], None]
    ) -> None:
        service = self.service
        room = service.engine_config.max_sequence_length
        given = request, service.tokenizer, self._style, room
        asked = await to_cpu_thread(partial(read_request, *given))
        with service.admission.admitted(context.id(), "", asked.fields.n) as ticket:
            ticket.names = asked.fields.caller_names
            guide = None
            if asked.guide is not None:
                guide = await service.compiled(ticket, *asked.guide)
            caller = context.trace_headers() or {}
            options = request_options(asked.fields, asked.salt, "", guide, caller)
            (stream,) = service.streams([asked.fields.prompt], asked.params, options)
            chunks = Chunks(asked, service.tokenizer)
            async with stream:
                await service.wait_for_first_output(ticket, [stream])
                async for outputs in service.outputs(ticket, stream):
                    for output in outputs:
                        put(chunks.of(output))

    def _told(self, error: ApiError) -> Exception:
        """Return an error as Dynamo's. After one of the worker's end, the frontend goes on with
        another worker."""
        ends = self.service.engine.rank_failure is not None or self._shutdown.has_begun
        if ends and error.status in (499, 503):
            return EngineShutdown(str(error))
        return (InvalidArgument if error.status == 400 else Unknown)(str(error))

    # Reports to operators and the router ---------------------------------------------------------

    async def _live(self, body: Json) -> Json:
        """Answer /engine/live, or raise if no step goes on. A failed rank ends the worker."""
        if (stall := self.service.admission.stall) is not None:
            raise RuntimeError(stall)
        return {"status": "live"}

    def _metrics(self, loop: asyncio.AbstractEventLoop) -> str:
        """Return the text of /metrics. Dynamo calls this in another thread than the loop's."""
        asked = asyncio.run_coroutine_threadsafe(self.service.engine.metrics(), loop)
        return asked.result(_SCRAPE_SECONDS)

    async def _tell_load(self, loads: WorkerMetricsPublisher) -> None:
        """Report to the router again and again how many blocks running requests have."""
        while True:
            stats = await self.service.engine.stats()
            loads.publish(0, kv_used_blocks=stats["kv_blocks_in_use"])
            await asyncio.sleep(_LOAD_SECONDS)

    async def _stay_in_discovery(
        self, place: _Place, register: Callable[[], Awaitable[None]]
    ) -> None:
        """Report this worker as ready while discovery has it. Register anew whenever discovery has
        lost it, as after a pause beyond its lease; end it if that does not help. While other
        weights have its name, wait for them to go."""
        num_tries = 0
        while num_tries <= _MOST_REGISTRATIONS:
            await asyncio.sleep(_DISCOVERY_SECONDS)
            if self._shutdown.has_begun:
                return
            is_there = place.has_me
            self._set_ready(is_there and self.service.admission.stall is None)
            num_tries = 0 if is_there or place.other_weights else num_tries + 1
            if not is_there:
                logger.warning("discovery has lost this worker: it registers anew")
                await run_steps(("registering anew", register, STEP_SECONDS))
        self._is_lost = True
        self._shutdown.begin()

    async def _end_relay(self) -> None:
        if (relay := self._relay) is not None:
            await run_steps(("the end of the relay of KV events", relay.shutdown, STEP_SECONDS))

    # The end -------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Begin the end after a signal that was noted, or when another rank has failed."""
        while True:
            self._shutdown.begin_if_due()
            await asyncio.sleep(_WATCH_SECONDS)


class _Place:
    """The entries of a worker, and of others at its endpoint, in discovery. `card` is the folder of
    the model's card, whose name depends on the weights."""

    def __init__(self, endpoint: Endpoint, client: Client, name: str, card: str):
        self._endpoint, self._client, self._name, self._card = endpoint, client, name, card
        self._watched = FpmEventSubscriber(endpoint)  # it keeps the cards of workers, too
        self._watched.start_tracking()
        self.close = self._watched.shutdown

    @property
    def has_me(self) -> bool:
        """Whether the worker can be found, with its model."""
        id = self._endpoint.connection_id()
        return id in self._client.instance_ids() and str(id) in self._watched.get_model_cards()

    @property
    def other_weights(self) -> set[str]:
        """Folders of cards of this name with other weights. Frontends would refuse the worker."""
        cards = map(json.loads, self._watched.get_model_cards().values())
        return {c["source_path"] for c in cards if c["display_name"] == self._name} - {self._card}


# The program ------------------------------------------------------------------------------------


def command_parser() -> CommandParser:
    """Make the parser of the options, ours and those of all of Dynamo's workers."""
    about = "Serve a model as a worker of NVIDIA Dynamo."
    parser = CommandParser("serve", about, f"python {' '.join(PROGRAM)}")
    parser.epilog = (
        "With --tp, --pp or --ep the worker starts a process for each rank on this machine, as "
        "megatron-hybrid serve does."
    )
    add_engine(parser)
    add_layout(parser)
    add_served_engine(parser)
    for field in _SERVING_FIELDS:
        option, given = SETTINGS[field]
        add_field(parser, option, SERVER, field, dest=field, **given)
    parser.add_argument(
        "--no-kv-events",
        action="store_false",
        dest="kv_events",
        help="Do not publish KV events. By default the router gets an event for each block that is "
        "cached or evicted.",
    )
    parser.add_argument(
        "--kv-events-endpoint",
        default="tcp://127.0.0.1:*",
        metavar="ENDPOINT",
        help="Publish KV events at this endpoint, to Dynamo and other readers. * is any free port.",
    )
    DynamoRuntimeArgGroup().add_arguments(parser)
    return parser


def _run(options: argparse.Namespace, end: EndSignal) -> int:
    # Fail now, not after the model is loaded.
    given = DynamoRuntimeConfig.from_cli_args(options)
    given.validate()
    parse_endpoint_types(given.endpoint_types)
    given.endpoint = ".".join(
        parse_endpoint(given.endpoint) if given.endpoint else (given.namespace, *_PLACE)
    )
    if options.custom_jinja_template:
        read_text("--custom-jinja-template", options.custom_jinja_template)
    config = served_config(options)
    fields = {field: getattr(options, field) for field in _SERVING_FIELDS}
    fields["model_name"] = options.model_name or Path(options.model).name
    serving = ServingConfig(**fields)
    options.chat_template = options.custom_jinja_template

    async def work(model: HybridModel, tokenizer: Tokenizer, publisher: KvPublisher | None) -> None:
        configure_dynamo_logging()
        folder, dtype = model_folder(options.model).resolve(), str(model.config.params_dtype)
        card = card_folder(folder, tokenizer, config.max_sequence_length, dtype)
        running = running_service(model, tokenizer, config, serving, publisher, end)
        async with running as service:
            freeze_objects()
            await HybridWorker(service, given, card, publisher).serve(end)

    def load() -> tuple[HybridModel, Tokenizer]:
        return load_for_chats(options, **sizes_of(options))

    @contextmanager
    def first() -> Iterator[Callable[[], None]]:
        publishes = options.kv_events and options.mode == "restore"  # else nothing can be resumed
        with KvPublisher(options.kv_events_endpoint) if publishes else nullcontext() as publisher:
            yield lambda: run(work(*load(), publisher))

    return run_on_ranks(options, PROGRAM, first, lambda: follow(*load(), config, serving, end), end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker until SIGTERM or Ctrl-C. Return the exit status."""
    options = command_parser().read(sys.argv[1:] if arguments is None else arguments)
    with EndSignal() as end:
        return reported(partial(_run, end=end), options)


if __name__ == "__main__":
    sys.exit(main())
