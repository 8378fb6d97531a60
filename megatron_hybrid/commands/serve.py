"""`megatron-hybrid serve`."""

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hybrid.commands.arguments import (
    PYTHON_NAMES,
    SERVER,
    add_chat_template,
    add_engine,
    add_field,
    add_served_engine,
    load_for_chats,
    served_config,
)
from megatron_hybrid.commands.layout import add_layout, run_on_ranks, sizes_of
from megatron_hybrid.serving.parsers import REASONING_PARSERS, TOOL_PARSERS
from megatron_hybrid.utils.child_lifetime import EndSignal

if TYPE_CHECKING:
    from megatron_hybrid.serving.kv_publisher import KvPublisher

HELP = "Serve a model over HTTP, by OpenAI's API."
API_KEYS, ADMIN_KEYS = "MEGATRON_HYBRID_API_KEYS", "MEGATRON_HYBRID_ADMIN_KEYS"
"""Variables with keys: command lines are shown to all users of a machine."""
_DEMO_NOTE = (
    "The demo model was trained on old books alone: it continues stories, it does not answer."
)


def _key(text: str) -> str:
    """A key of an option. An empty one, of a variable that is not set, would open the server."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the key is empty: give one, or leave the option out")
    return text.strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "With --tp, --pp or --ep the command starts a process for each rank on this machine. Under "
        "torchrun the command is itself one of the ranks: torchrun --nproc-per-node 4 -m "
        "megatron_hybrid serve MODEL --tp 2 --pp 2. Each rank has caches of the given sizes. "
        "SIGTERM or Ctrl-C ends the server: it refuses new requests, lets running requests end, "
        "and saves the cache to --cache-dir. A second signal ends it at once. Serving needs "
        f"pip install 'megatron_hybrid[serve]'. {PYTHON_NAMES}"
    )
    add_engine(parser)
    add_layout(parser)
    parser.add_argument("--host", default="127.0.0.1", help="Listen at this address.")
    parser.add_argument("--port", type=int, default=8000, help="Listen on this port.")
    parser.add_argument(
        "--uds", metavar="PATH", help="Listen on this Unix socket, in place of a port."
    )
    parser.add_argument(
        "--ssl-certfile", metavar="FILE", help="Serve HTTPS by the certificate in this PEM file."
    )
    parser.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="Read the key of the certificate from this file. By default the file of the "
        "certificate has the key, too.",
    )
    add_field(parser, "--root-path", SERVER, "root_path", metavar="PATH")
    add_field(
        parser,
        "--cors-origin",
        SERVER,
        "cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
    )
    add_field(
        parser,
        "--allowed-host",
        SERVER,
        "allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
    )
    add_served_engine(parser)
    add_field(parser, "--max-waiting", SERVER, "max_waiting", type=int, metavar="N")
    add_field(
        parser, "--max-requests-per-key", SERVER, "max_requests_per_key", type=int, metavar="N"
    )
    parser.add_argument(
        "--kv-events-endpoint",
        metavar="ENDPOINT",
        help="Publish at this ZeroMQ endpoint, such as tcp://127.0.0.1:5557, which blocks of "
        "prompts are cached, as vLLM does for routers. Anyone who can reach the endpoint "
        "reads the tokens of prompts. The server listens at the endpoint, and never "
        "connects. By default nothing is published. This needs pip install "
        "'megatron_hybrid[kv-events]'.",
    )
    parser.add_argument(
        "--kv-events-replay-endpoint",
        metavar="ENDPOINT",
        help="Let routers that missed some of these messages request the last 10,000 again, at "
        "this endpoint. By default they cannot.",
    )
    parser.add_argument(
        "--kv-events-topic",
        default="",
        metavar="TOPIC",
        help="Publish these messages under this topic. llm-d expects kv@POD@MODEL.",
    )
    add_field(parser, "--served-model-name", SERVER, "model_name", metavar="NAME")
    add_chat_template(parser)
    for field, parsers in (
        ("tool_call_parser", TOOL_PARSERS),
        ("reasoning_parser", REASONING_PARSERS),
    ):
        option = f"--{field.replace('_', '-')}"
        names = sorted(parsers)
        more = f"Parsers are {', '.join(names)}."
        add_field(parser, option, SERVER, field, more, choices=names, metavar="NAME")
    add_field(
        parser, "--trust-request-chat-template", SERVER, "trusts_templates", action="store_true"
    )
    for option, name in (
        ("--keep-changing-lines", "keeps_changing_lines"),
        ("--lower-max-tokens", "lowers_max_tokens"),
        ("--log-prompts", "logs_prompts"),
    ):
        add_field(parser, option, SERVER, name, action="store_true")
    add_field(
        parser,
        "--api-key",
        SERVER,
        "api_keys",
        action="append",
        default=[],
        type=_key,
        metavar="KEY",
    )
    add_field(
        parser,
        "--admin-key",
        SERVER,
        "admin_keys",
        action="append",
        default=[],
        type=_key,
        metavar="KEY",
    )
    add_field(parser, "--take-weights", SERVER, "takes_weights", action="store_true")
    add_field(parser, "--share-cache", SERVER, "shares_cache", action="store_true")
    add_field(parser, "--show-prompts", SERVER, "shows_prompts", action="store_true")
    add_field(
        parser, "--max-body-mib", SERVER, "max_body_bytes", type=int, default=16, metavar="MIB"
    )
    add_field(parser, "--queue-timeout", SERVER, "queue_seconds", type=float, metavar="SECONDS")
    add_field(parser, "--request-timeout", SERVER, "request_seconds", type=float, metavar="SECONDS")
    add_field(parser, "--shutdown-timeout", SERVER, "drain_seconds", type=float, metavar="SECONDS")


def _kv_publisher(options: argparse.Namespace) -> "AbstractContextManager[KvPublisher | None]":
    """The publisher of KV events, bound to its endpoints; of None, if there are no endpoints."""
    if not (
        options.kv_events_endpoint or options.kv_events_replay_endpoint or options.kv_events_topic
    ):
        return nullcontext()
    try:
        from megatron_hybrid.serving.kv_publisher import KvPublisher
    except ImportError as error:
        raise ImportError(
            f"{error}: --kv-events-endpoint needs pip install 'megatron_hybrid[kv-events]'"
        ) from error
    from megatron_hybrid.serving.kv_events import check_mode

    check_mode(options.mode)  # fail now, not after the model is loaded
    return KvPublisher(
        options.kv_events_endpoint or "",
        options.kv_events_replay_endpoint or "",
        options.kv_events_topic,
    )


def keys_of(given: Sequence[str], variable: str) -> tuple[str, ...]:
    """The keys of an option and of its environment variable, each once: several keys do not share
    cached prefixes, and equal ones are one key.

    Raises:
        ValueError: the variable is set and holds no key.
    """
    named = list(filter(None, map(str.strip, os.environ.get(variable, "").split(","))))
    if variable in os.environ and not named:
        raise ValueError(
            f"the environment variable {variable} holds no key, which would open what it is to "
            "close: give keys, separated by commas, or unset it"
        )
    return tuple(dict.fromkeys((*given, *named)))


def run(options: argparse.Namespace) -> int:
    with EndSignal() as end:
        return _run(options, end)


def _run(options: argparse.Namespace, end: EndSignal) -> int:
    try:
        from megatron_hybrid.serving.run import Address, follow, log_lines, run, serve
    except ImportError as error:
        raise ImportError(f"{error}: serving needs pip install 'megatron_hybrid[serve]'") from error
    from rich.console import Console

    from megatron_hybrid.serving.config import ServingConfig

    address = Address(
        options.host, options.port, options.uds, options.ssl_certfile, options.ssl_keyfile
    )
    config = served_config(options)
    serving = ServingConfig(
        options.served_model_name or Path(options.model).name,
        api_keys=keys_of(options.api_key, API_KEYS),
        description=_DEMO_NOTE if options.model == "demo" else "",
        admin_keys=keys_of(options.admin_key, ADMIN_KEYS),
        shows_prompts=options.show_prompts,
        trusts_templates=options.trust_request_chat_template,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        takes_weights=options.take_weights,
        shares_cache=options.share_cache,
        allowed_hosts=(*options.allowed_host, options.host),
        cors_origins=tuple(options.cors_origin),
        root_path=options.root_path,
        max_body_bytes=options.max_body_mib << 20,
        max_waiting=options.max_waiting,
        max_requests_per_key=options.max_requests_per_key,
        queue_seconds=options.queue_timeout,
        request_seconds=options.request_timeout,
        drain_seconds=options.shutdown_timeout,
    )

    def run_rank(rank: int | None) -> None:
        log_lines(rank)
        if rank:
            follow(*load_for_chats(options, **sizes_of(options)), config, serving, end)
            return
        bound = address.bind()  # fail now, not after the model is loaded
        with _kv_publisher(options) as publisher, address.loading(bound) as loading:
            with Console(stderr=True).status(f"loading {options.model}"):
                model, tokenizer = load_for_chats(options, **sizes_of(options))
            run(serve(model, tokenizer, config, serving, address, bound, loading, publisher, end))

    def check() -> None:
        if (bound := address.bind()) is not None:  # the first rank binds it anew
            bound.close()
        with _kv_publisher(options):
            pass

    return run_on_ranks(options, ["-m", "megatron_hybrid", "serve"], check, run_rank, end)
