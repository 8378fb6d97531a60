"""`megatron-hybrid bench-serve`."""

import argparse
import math
import os
from pathlib import Path

from megatron_hybrid.commands.arguments import check_file, positive, whole_number

HELP = "Put load on a server with OpenAI's API, and measure throughput, latencies and reuse."


def request_rate(text: str) -> float | None:
    """None: recorded."""
    told = "requests a second, inf or the word recorded"
    return None if text == "recorded" else positive(text, told, math.inf)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Requests are sent as streams. Ctrl-C ends the run and prints the results so far. The "
        "exit status is 1 if a request failed."
    )
    parser.add_argument(
        "prompts",
        metavar="PROMPTS",
        help="Send the requests of this JSONL file. It has the form that `profile` reads; a line "
        "may have `max_tokens`, and `cache_salt` (requests of different salts share nothing).",
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="Send requests to the server at this address.",
    )
    parser.add_argument(
        "--model",
        dest="served_model",
        metavar="NAME",
        help="Ask for the model that the server has under this name. The default is the server's "
        "first model.",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="Send this API key. The default is the value of the environment variable "
        "OPENAI_API_KEY, if it is set.",
    )
    parser.add_argument(
        "--num-prompts",
        type=whole_number,
        metavar="N",
        help="Send the first N requests of the file. The default is all of them.",
    )
    parser.add_argument(
        "--request-rate",
        type=request_rate,
        default=math.inf,
        metavar="RATE",
        help="Send RATE requests a second, at random times (a Poisson process). inf, the default, "
        "sends each request as soon as --max-concurrency allows. recorded sends each request "
        "at the time of its `arrival` in the file.",
    )
    parser.add_argument(
        "--max-concurrency",
        type=whole_number,
        metavar="N",
        help="Have at most N unanswered requests. The default is 64 if the rate is inf, else there "
        "is no limit.",
    )
    parser.add_argument(
        "--output-len",
        type=whole_number,
        default=256,
        metavar="N",
        help="Ask for at most N tokens where a line has neither `max_tokens` nor an `output` of "
        "token ids.",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="Let each answer continue past the model's stop tokens, up to its limit.",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="Ask for this temperature; 0 always takes the most likely token.",
    )
    parser.add_argument(
        "--vocab-size",
        type=whole_number,
        metavar="N",
        help="Send token ids of the file modulo N, if they are too large for the model. By "
        "default token ids are sent unchanged.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Draw the random times of --request-rate from this seed.",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="Also write the results to this file, with one row for each request.",
    )


def run(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.bench_serve import (
        Server,
        arrivals,
        read_calls,
        render,
        run,
        summarize,
        to_dict,
    )

    if options.prompts.startswith(("http://", "https://")):
        raise ValueError(f"PROMPTS is {options.prompts}: give a file, and the URL as --base-url")
    if options.json:
        check_file("--json", options.json)
    server = Server(options.base_url, options.api_key or os.environ.get("OPENAI_API_KEY"))
    calls = read_calls(
        options.prompts,
        options.served_model or server.first_model(),
        options.num_prompts,
        options.output_len,
        options.ignore_eos,
        options.temperature,
        options.vocab_size,
    )
    starts = arrivals(calls, options.request_rate, options.seed)
    concurrency = options.max_concurrency
    if concurrency is None and options.request_rate == math.inf:
        concurrency = 64
    found = run(server, calls, starts, concurrency)
    summary = summarize(found)
    print(render(summary))
    if options.json:
        text = json.dumps(to_dict(found), indent=1) + "\n"
        Path(options.json).write_text(text, encoding="utf-8")
    if summary["unfinished"]:  # Ctrl-C
        return 130
    return 1 if summary["failed"] else 0
