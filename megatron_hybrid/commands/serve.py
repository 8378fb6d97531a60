"""`megatron-hybrid serve`."""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hybrid.commands.arguments import (
    SERVER,
    add_chat_template,
    add_engine,
    add_field,
    add_served_engine,
    load_for_chats,
    served_config,
)
from megatron_hybrid.commands.layout import add_layout, run_on_ranks, sizes_of
from megatron_hybrid.serving.parsers.choice import REASONING_PARSERS, TOOL_PARSERS
from megatron_hybrid.utils.child_lifetime import EndSignal

if TYPE_CHECKING:
    from megatron_hybrid.serving.kv_publisher import KvPublisher

HELP = "Serve a model over HTTP, by OpenAI's API."
API_KEYS, ADMIN_KEYS = "MEGATRON_HYBRID_API_KEYS", "MEGATRON_HYBRID_ADMIN_KEYS"
"""Environment variables with keys, since all users of a machine see command lines."""
_DEMO_NOTE = (
    "The demo model was trained on old books alone: it continues stories, it does not answer."
)


def _key(text: str) -> str:
    """Check the key of an option. An empty one, from an unset variable, would open the server."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the key is empty: give one, or leave the option out")
    return text.strip()


def _parsers(parsers: Iterable[str]) -> dict[str, Any]:
    names = sorted(parsers)
    return {"more": f"Parsers are {', '.join(names)}.", "choices": names, "metavar": "NAME"}


_FLAG: dict[str, Any] = {"action": "store_true"}
_MANY: dict[str, Any] = {"action": "append", "default": []}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "root_path": ("--root-path", {"metavar": "PATH"}),
    "cors_origins": ("--cors-origin", {**_MANY, "metavar": "ORIGIN"}),
    "allowed_hosts": ("--allowed-host", {**_MANY, "metavar": "NAME"}),
    "max_waiting": ("--max-waiting", {"metavar": "N"}),
    "max_requests_per_key": ("--max-requests-per-key", {"metavar": "N"}),
    "model_name": ("--served-model-name", {"metavar": "NAME"}),
    "adapters": ("--adapter", {**_MANY, "metavar": "NAME=FOLDER"}),
    "tool_call_parser": ("--tool-call-parser", _parsers(TOOL_PARSERS)),
    "reasoning_parser": ("--reasoning-parser", _parsers(REASONING_PARSERS)),
    "keeps_changing_lines": ("--keep-changing-lines", _FLAG),
    "lowers_max_tokens": ("--lower-max-tokens", _FLAG),
    "logs_prompts": ("--log-prompts", _FLAG),
    "api_keys": ("--api-key", {**_MANY, "type": _key, "metavar": "KEY"}),
    "admin_keys": ("--admin-key", {**_MANY, "type": _key, "metavar": "KEY"}),
    "takes_weights": ("--take-weights", _FLAG),
    "shares_cache": ("--share-cache", _FLAG),
    "shows_prompts": ("--show-prompts", _FLAG),
    "max_body_bytes": ("--max-body-mib", {"default": 16, "metavar": "MIB"}),
    "queue_seconds": ("--queue-timeout", {"metavar": "SECONDS"}),
    "request_seconds": ("--request-timeout", {"metavar": "SECONDS"}),
    "drain_seconds": ("--shutdown-timeout", {"metavar": "SECONDS"}),
}
"""Fields of ServingConfig -> the option of each, and arguments of `add_argument`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "With --tp, --pp or --ep the command starts a process for each rank on this machine. Under "
        "torchrun the command is itself one of the ranks: torchrun --nproc-per-node 4 -m "
        "megatron_hybrid serve MODEL --tp 2 --pp 2. Each rank has caches of the given sizes. "
        "SIGTERM or Ctrl-C ends the server: it refuses new requests, lets running requests end, "
        "and saves the cache to --cache-dir. A second signal ends it at once. Serving needs "
        "pip install -e '.[serve]'."
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
    add_served_engine(parser)
    add_chat_template(parser)
    for field, (option, given) in SETTINGS.items():
        add_field(parser, option, SERVER, field, dest=field, **given)
    parser.add_argument(
        "--kv-events-endpoint",
        metavar="ENDPOINT",
        help="Publish at this ZeroMQ endpoint, such as tcp://127.0.0.1:5557, which blocks of "
        "prompts are cached, as vLLM does for routers. Anyone who can reach the endpoint "
        "reads the tokens of prompts. The server listens at the endpoint, and never "
        "connects. By default nothing is published. This needs pip install "
        "-e '.[kv-events]'.",
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


def _kv_publisher(options: argparse.Namespace) -> "AbstractContextManager[KvPublisher | None]":
    """Return the context of a publisher of KV events, or of None if no endpoints are given."""
    if not (
        options.kv_events_endpoint or options.kv_events_replay_endpoint or options.kv_events_topic
    ):
        return nullcontext()
    if not options.kv_events_endpoint:
        raise ValueError(
            "--kv-events-replay-endpoint and --kv-events-topic need --kv-events-endpoint"
        )
    try:
        from megatron_hybrid.serving.kv_publisher import KvPublisher
    except ImportError as error:
        raise ImportError(
            f"{error}: --kv-events-endpoint needs pip install -e '.[kv-events]'"
        ) from error
    from megatron_hybrid.serving.kv_events import check_mode

    check_mode(options.mode)  # fail now, not after the model is loaded
    return KvPublisher(
        options.kv_events_endpoint,
        options.kv_events_replay_endpoint or "",
        options.kv_events_topic,
    )


def keys_of(given: Sequence[str], variable: str) -> tuple[str, ...]:
    """Return the keys of an option and of its environment variable, each once: several keys do not
    share cached prefixes, and equal ones are one key.

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
        from megatron_hybrid.serving import run as server
    except ImportError as error:
        raise ImportError(f"{error}: serving needs pip install -e '.[serve]'") from error
    from megatron_hybrid.checkpoints.adapter_files import read_adapter_fields
    from megatron_hybrid.serving.config import ServingConfig

    address = server.Address(
        options.host, options.port, options.uds, options.ssl_certfile, options.ssl_keyfile
    )
    config = served_config(options)
    given = {field: getattr(options, field) for field in SETTINGS}
    given |= {
        "model_name": options.model_name or Path(options.model).name,
        "description": _DEMO_NOTE if options.model == "demo" else "",
        "adapters": tuple(options.adapters),
        "api_keys": keys_of(options.api_keys, API_KEYS),
        "admin_keys": keys_of(options.admin_keys, ADMIN_KEYS),
        "allowed_hosts": (*options.allowed_hosts, options.host),
        "cors_origins": tuple(options.cors_origins),
        "max_body_bytes": options.max_body_bytes << 20,
    }
    serving = ServingConfig(**given)
    if (needed := len(serving.adapters)) > config.max_adapters:
        raise ValueError(f"max_adapters is {config.max_adapters}; --adapter needs {needed}.")
    for each in serving.adapters:  # fail now, not after the model is loaded
        read_adapter_fields(Path(each.partition("=")[2]))

    def loaded() -> tuple:
        return *load_for_chats(options, **sizes_of(options)), config, serving

    @contextmanager
    def first() -> Iterator[Callable[[], None]]:
        bound = address.bind()  # fail now, not after the model is loaded
        with bound or nullcontext(), _kv_publisher(options) as publisher:

            def serve() -> None:
                running = server.running_service(*loaded(), publisher, end)
                server.run(server.serve(running, address, bound, end))

            yield serve

    program = ["-m", "megatron_hybrid", "serve"]
    return run_on_ranks(options, program, first, lambda: server.follow(*loaded(), end), end)
