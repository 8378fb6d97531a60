"""`megatron-hybrid serve`."""

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hybrid.commands.arguments import (
    PYTHON_NAMES,
    add_chat_template,
    add_engine,
    add_served_engine,
    load_for_chats,
    served_config,
)
from megatron_hybrid.commands.layout import add_layout, run_on_ranks, sizes_of
from megatron_hybrid.serving.parsers import REASONING_PARSERS, TOOL_PARSERS
from megatron_hybrid.utils.process_life import EndSignal

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
    parser.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="Name the path, such as /llm, under which a proxy offers this server.",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="Let web pages of this site, such as https://chat.example, call the server; * allows "
        "all sites. The option may be given several times. By default only the server's own "
        "page may call it.",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Without API keys, also answer requests that were sent to this host name. Other such "
        "requests must have been sent to an IP address, to localhost, or to the name of this "
        "machine. The option may be given several times.",
    )
    add_served_engine(parser)
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="Let at most N requests wait in addition to those that run; further requests are "
        "refused with 503. Each sample of each prompt counts as a request.",
    )
    parser.add_argument(
        "--max-requests-per-key",
        type=int,
        metavar="N",
        help="Let an API key have at most N unanswered requests; further requests are refused "
        "with 429. By default there is no limit.",
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
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="Offer the model under this name. The default is the name of its folder.",
    )
    add_chat_template(parser)
    for kind, parsers, what in (
        ("tool-call", TOOL_PARSERS, "calls of functions"),
        ("reasoning", REASONING_PARSERS, "reasoning"),
    ):
        parser.add_argument(
            f"--{kind}-parser",
            default="",
            choices=sorted(parsers),
            metavar="NAME",
            help=f"Read {what} in answers by this parser: {', '.join(sorted(parsers))}. none "
            "leaves them in the text. By default the parser follows from the chat template.",
        )
    parser.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="Let requests bring a chat_template of their own. A template is a program: it runs "
        "in a sandbox, but may take any time and memory. By default such requests are "
        "refused.",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        type=_key,
        default=[],
        metavar="KEY",
        help="Answer only clients that send this key. The option may be given several times. More "
        f"keys are read from the environment variable {API_KEYS}, separated by commas.",
    )
    parser.add_argument(
        "--admin-key",
        action="append",
        type=_key,
        default=[],
        metavar="KEY",
        help="Only this key opens the routes of the operator, such as /cache/reset. By default a "
        "single API key does; with several they are closed. The option may be given several times; "
        f"more keys are read from {ADMIN_KEYS}, separated by commas.",
    )
    parser.add_argument(
        "--take-weights",
        action="store_true",
        help="Let a trainer pause this server and send it new weights, by the operator's routes "
        "/pause, /sleep, /update_weights and others. Anyone who may call these routes can "
        "change the model. By default the server does not have these routes.",
    )
    parser.add_argument(
        "--share-cache",
        action="store_true",
        help="Let all API keys share cached prefixes. By default each of several keys has cached "
        "prefixes of its own.",
    )
    parser.add_argument(
        "--show-prompts",
        action="store_true",
        help="Show texts of prompts on the operator's page. By default the page shows only their "
        "lengths.",
    )
    parser.add_argument(
        "--max-body-mib",
        type=int,
        default=16,
        metavar="MIB",
        help="Refuse with 413 a request whose body is larger than this, in MiB.",
    )
    parser.add_argument(
        "--queue-timeout",
        type=float,
        metavar="SECONDS",
        help="Refuse with 503 a request that has waited this long. A request of several prompts "
        "waits until its first prompt starts. By default there is no limit.",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="End with 504 a request that has taken this long, waiting included. By default there "
        "is no limit.",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="Give running requests this much time to end after SIGTERM or Ctrl-C.",
    )


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

    from megatron_hybrid.serving.service import ServingConfig

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
