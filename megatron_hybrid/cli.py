"""The command line: `megatron-hybrid demo`, `generate`, `explain`, `convert`, `plan`, ..."""

import argparse
import math
import os
import sys
from pathlib import Path

from megatron_hybrid.version import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # A list of arguments ends at an option: what follows that is its rest.
    if "overrides" in options and not any(argument.startswith("-") for argument in rest):
        options.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status = options.command(options)
        sys.stdout.flush()  # here, not at Python's exit, where errors are not caught
        return status
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"megatron-hybrid: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"megatron-hybrid: not enough memory on this machine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the defaults of options to the help, except None and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. Commands import their modules when they run, so it needs no torch."""
    parser = argparse.ArgumentParser(
        prog="megatron-hybrid",
        description="Hybrid language models with prefix sharing at any token.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="the three prefix-caching modes side by side",
        formatter_class=_Formatter,
    )
    demo.add_argument("--model", default="demo", help="'demo', or a checkpoint folder")
    demo.set_defaults(command=_demo)

    generate = commands.add_parser(
        "generate",
        help="continue your own text",
        epilog="First in brackets: the name in Python, which errors use. The model's own defaults "
        "are those of its generation_config.json.",
        formatter_class=_Formatter,
    )
    generate.add_argument(
        "--prompt",
        action="append",
        required=True,
        help="text to continue; several prompts run through one cache, one after the other",
    )
    default = "(default: the model's own, else"
    generate.add_argument(
        "--tokens",
        type=int,
        help=f"most tokens to generate (num_tokens_to_generate) {default} 30)",
    )
    generate.add_argument("--temperature", type=float, help=f"0 is greedy {default} 1)")
    generate.add_argument("--top-k", type=int, help=f"0 keeps all tokens {default} 0)")
    generate.add_argument("--top-p", type=float, help=f"0 keeps all tokens {default} 0)")
    generate.add_argument(
        "--seed", type=int, help="of each prompt's draws (default: one from its place in the call)"
    )
    _add_engine(generate)
    generate.set_defaults(command=_generate)

    explain = commands.add_parser(
        "explain",
        help="what a cache knows of a prompt, and why it stops",
        description="What would be skipped of the last prompt, and why not more. Others before it "
        "are computed first.",
        epilog="First in brackets: the name in Python, which errors use.",
        formatter_class=_Formatter,
    )
    explain.add_argument("--prompt", action="append", required=True, help="text; the last counts")
    _add_engine(explain)
    explain.set_defaults(command=_explain)

    serve = commands.add_parser(
        "serve",
        help="OpenAI's API over HTTP",
        description="Serve a model until SIGTERM; then running requests end, and the cache is "
        "saved. Needs pip install '.[serve]'.",
        formatter_class=_Formatter,
    )
    _add_engine(serve, as_option=False)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--max-requests", type=int, default=64, help="that run side by side")
    serve.add_argument("--max-waiting", type=int, default=256, help="requests beside those")
    serve.add_argument(
        "--max-requests-per-key", type=int, help="unanswered ones of one API key (default: any)"
    )
    serve.add_argument("--served-model-name", help="default: the folder's name")
    serve.add_argument("--chat-template", metavar="FILE", help="in place of the model's")
    serve.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="opens the API; may be given again. Also from MEGATRON_HYBRID_API_KEYS, by commas",
    )
    serve.add_argument(
        "--admin-key", action="append", default=[], help="of the operator, for /cache/*"
    )
    serve.add_argument(
        "--share-cache",
        action="store_true",
        help="among the API keys; else each of several has cached prefixes of its own",
    )
    serve.add_argument(
        "--show-prompts", action="store_true", help="on the page, to the operator; else lengths"
    )
    serve.add_argument("--max-body-mib", type=int, default=16)
    serve.add_argument(
        "--queue-timeout", type=float, metavar="SECONDS", help="for a request to begin; then 503"
    )
    serve.add_argument(
        "--request-timeout", type=float, metavar="SECONDS", help="waiting included; then 504"
    )
    serve.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM, for the requests that run",
    )
    serve.set_defaults(command=_serve)

    bench = commands.add_parser(
        "bench-serve",
        help="load on a server of OpenAI's API: throughput, latencies, what was skipped",
        description="Send the requests of a file to a server, as streams. Exit status 1: some "
        "failed. Ctrl-C prints what was measured so far.",
        formatter_class=_Formatter,
    )
    bench.add_argument(
        "prompts",
        help="JSONL as for `profile`, with `max_tokens` and `cache_salt` in a line if wanted",
    )
    bench.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000")
    bench.add_argument("--model", metavar="NAME", help="default: the first that is served")
    bench.add_argument("--api-key", help="default: that of OPENAI_API_KEY, if any")
    bench.add_argument(
        "--num-prompts", type=whole_number, metavar="N", help="the first N (default: all)"
    )
    bench.add_argument(
        "--request-rate",
        type=request_rate,
        default=math.inf,
        metavar="RATE",
        help="a second, at random times (Poisson); inf: as --max-concurrency allows; recorded: by "
        "`arrival` in the file",
    )
    bench.add_argument(
        "--max-concurrency",
        type=whole_number,
        metavar="N",
        help="requests at a time (default: 64 at the rate inf, else any number)",
    )
    bench.add_argument(
        "--output-len",
        type=whole_number,
        default=256,
        metavar="N",
        help="most tokens of an answer, where the file has no `max_tokens` and no `output` in ids",
    )
    bench.add_argument("--ignore-eos", action="store_true", help="answers have all these tokens")
    bench.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    bench.add_argument(
        "--vocab-size",
        type=whole_number,
        metavar="N",
        help="token ids in the file are taken modulo N (default: sent as they are)",
    )
    bench.add_argument("--seed", type=int, default=0, help="of the random times")
    bench.add_argument("--json", metavar="FILE", help="also write it, with a row for each request")
    bench.set_defaults(command=_bench_serve)

    chat = commands.add_parser(
        "chat",
        help="talk to a model, and see what each turn reuses",
        formatter_class=_Formatter,
    )
    _add_engine(chat, as_option=False)
    chat.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    chat.add_argument("--temperature", type=float, help=f"0 is greedy {default} 1)")
    chat.add_argument("--chat-template", metavar="FILE", help="in place of the model's")
    chat.set_defaults(command=_chat)

    convert = commands.add_parser(
        "convert",
        help="between checkpoints of ours, Hugging Face's and Megatron-LM's (torch_dist)",
        formatter_class=_Formatter,
    )
    convert.add_argument("source", help="folder to read, of any of these kinds")
    convert.add_argument("target", help="folder to write; must not exist, or be empty")
    convert.add_argument(
        "--to",
        choices=("ours", "huggingface", "torch_dist"),
        default="ours",
        help="huggingface: back to the architecture that the model came from; torch_dist: for "
        "Megatron-LM, if megatron-core's hybrid models can hold the model",
    )
    convert.add_argument(
        "--huggingface-config",
        metavar="FOLDER",
        help="of a model of the same architecture, for weights that were trained here or by "
        "Megatron-LM: is needed for --to huggingface, gives tokenizer and size of the vocabulary",
    )
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the source"
    )
    convert.set_defaults(command=_convert)

    train = commands.add_parser(
        "train",
        help="train a model by a recipe; on many GPUs under torchrun",
        description="Train by a recipe. A run that was stopped goes on from its newest checkpoint.",
        epilog="On 8 GPUs: torchrun --nproc-per-node 8 -m megatron_hybrid train RECIPE",
        formatter_class=_Formatter,
    )
    train.add_argument("recipe", help="a YAML file, or the name of a recipe in the package")
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="SECTION.FIELD=VALUE",
        help="values in the place of the recipe's, such as run.steps=100",
    )
    train.add_argument(
        "--folder", help="of the run (default: runs/ and the recipe's name in this folder)"
    )
    train.set_defaults(command=_train)

    plan = commands.add_parser(
        "plan",
        help="a model on a device: KV, states, largest batch, what a cache holds, speed at best",
        formatter_class=_Formatter,
    )
    plan.add_argument(
        "--model", required=True, help="model folder, config.json, or recipe with its vocab_size"
    )
    plan.add_argument("--memory", type=gigabytes, help="in GB (10^9); default: the device's")
    plan.add_argument(
        "--device", help="a100, h100, h200 or b200: also bound the times of prefill and decode"
    )
    plan.add_argument("--flops", type=float, help="in TFLOP/s, in place of the device's")
    plan.add_argument("--bandwidth", type=float, help="in TB/s, in place of the device's")
    plan.add_argument("--context", default="8k", help="tokens of a request: 4096, 100k, 1M")
    _add_state_encoding(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(command=_plan)

    profile = commands.add_parser(
        "profile",
        help="your own prompts: what prefix caches would skip of them",
        formatter_class=_Formatter,
    )
    profile.add_argument(
        "prompts",
        help="JSONL: `prompt` (text, token ids or a chat's messages, with `tools` if it has any) "
        "in each line, if known `output`, `session`, `turn` and `arrival`",
    )
    profile.add_argument("--model", required=True, help="model folder or config.json")
    profile.add_argument(
        "--memory", type=gigabytes, required=True, help="of the cache, in GB (10^9)"
    )
    _add_state_encoding(profile)
    profile.add_argument("--json", action="store_true", help="print JSON instead of a table")
    profile.add_argument("--png", metavar="FILE", help="also draw it (needs matplotlib)")
    profile.set_defaults(command=_profile)

    preprocess = commands.add_parser(
        "preprocess",
        help="text or conversations to a dataset of tokens, for training",
        description="Writes PREFIX.bin and PREFIX.idx (megatron-core's format) and PREFIX.json "
        "(which tokenizer made them). Documents keep their order.",
        formatter_class=_Formatter,
    )
    preprocess.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl, .txt (also .gz) or .parquet; a text file is one document",
    )
    preprocess.add_argument(
        "--tokenizer", required=True, help="folder of the model that is to be trained, or 'demo'"
    )
    preprocess.add_argument("--output", metavar="PREFIX", help="of the files to write")
    preprocess.add_argument(
        "--key", help="field of the text (default: text) or of the conversation (messages)"
    )
    preprocess.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes that encode"
    )
    preprocess.add_argument(
        "--chat",
        action="store_true",
        help="documents are conversations: the chat template writes them, with loss on the "
        "answers alone",
    )
    preprocess.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="end each document with the end token (default: yes, without --chat)",
    )
    preprocess.add_argument(
        "--one-per-line", action="store_true", help="each line of a text file is a document"
    )
    preprocess.add_argument(
        "--skip-broken", action="store_true", help="leave out lines that are no documents"
    )
    preprocess.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="TOKENS",
        help="first train a tokenizer (byte-level BPE) of so many tokens on the input, and write "
        "it to --tokenizer",
    )
    preprocess.set_defaults(command=_preprocess)

    info = commands.add_parser("info", help="what is installed, and what of it is used")
    info.set_defaults(command=_info)

    grafana = commands.add_parser("grafana", help="a dashboard over the metrics, as JSON")
    grafana.set_defaults(command=_grafana)
    return parser


def gigabytes(text: str) -> float:
    try:
        number = float(text.lower().removesuffix("gb"))
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:  # also NaN
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a number of GB above 0 and below a billion"
        )
    return number


def whole_number(text: str) -> int:
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return number


def request_rate(text: str) -> float | None:
    """None: recorded."""
    if text == "recorded":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:  # also NaN
        raise argparse.ArgumentTypeError(
            f"{text!r}: give requests a second, inf or the word recorded"
        )
    return rate


def _add_state_encoding(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--state-encoding", default="exact", help="of cached states: exact, bf16 or int8"
    )


def _add_engine(command: argparse.ArgumentParser, as_option: bool = True) -> None:
    """as_option: the model is `--model`; else it is an argument."""
    about = {"default": "demo", "help": "'demo', or a checkpoint folder"}
    if as_option:
        command.add_argument("--model", **about)
    else:
        command.add_argument("model", nargs="?", **about)
    command.add_argument(
        "--context",
        default="8192",
        help="most tokens of prompt and answer: 4096, 100k, 1M (max_sequence_length)",
    )
    command.add_argument(
        "--mode", default="restore", help="off, memory_only or restore (prefix_caching)"
    )
    command.add_argument(
        "--cache-mib",
        type=int,
        help="size of the page pool in MiB (cache_bytes); default: what the device has left, times "
        "--memory-fraction",
    )
    command.add_argument(
        "--memory-fraction",
        type=float,
        default=0.9,
        help="part of the memory that is left, without --cache-mib (memory_fraction); of a CPU's "
        "at most a quarter",
    )
    command.add_argument(
        "--host-cache-mib",
        type=int,
        default=0,
        help="host memory for what the pool has no room for, in MiB (host_cache_bytes)",
    )
    _add_state_encoding(command)
    command.add_argument(
        "--cache-dir",
        help="folder that keeps the cache from one call to the next, of prompts from 16 tokens on",
    )


def _engine(options: argparse.Namespace):
    """Make an engine from the options of `_add_engine`."""
    from megatron_hybrid.inference.engine import DynamicInferenceEngine

    config = _inference_config(options)
    return DynamicInferenceEngine(*_load(options.model), config)


def _inference_config(options: argparse.Namespace, **fields):
    """From the options of `_add_engine`, and others."""
    from megatron_hybrid.inference.config import InferenceConfig
    from megatron_hybrid.tools.plan import parse_count

    return InferenceConfig(
        prefix_caching=options.mode,
        cache_bytes=None if options.cache_mib is None else options.cache_mib << 20,
        memory_fraction=options.memory_fraction,
        host_cache_bytes=options.host_cache_mib << 20,
        max_sequence_length=parse_count(options.context),
        state_encoding=options.state_encoding,
        cache_dir=options.cache_dir,
        **fields,
    )


def _load(folder: str):
    """Load model and tokenizer, on the GPU if there is one; on a CPU in fp32, which is faster there
    and avoids near ties in greedy answers."""
    import torch

    from megatron_hybrid.checkpoints.checkpoint import CheckpointError
    from megatron_hybrid.checkpoints.pretrained import load_pretrained

    on_gpu = torch.cuda.is_available()
    model, tokenizer = load_pretrained(
        folder, device="cuda" if on_gpu else "cpu", dtype=None if on_gpu else torch.float32
    )
    if tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, which text prompts need")
    return model, tokenizer


def _load_for_chats(options: argparse.Namespace):
    """Model and tokenizer, with the template that was asked for."""
    model, tokenizer = _load(options.model)
    if options.chat_template:
        source = Path(options.chat_template).read_text(encoding="utf-8")
        tokenizer.set_chat_template(source, options.chat_template)
    return model, tokenizer


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_hybrid.tools.demo import run_demo

    console = Console()
    with console.status("loading the model"):
        model, tokenizer = _load(options.model)
    return 0 if run_demo(model, tokenizer, console) else 1


def _generate(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        num_tokens_to_generate=options.tokens,
    )
    engine = _engine(options)
    for prompt in options.prompt:
        events = engine.stream(prompt, params)  # an impossible request is refused here
        print(prompt, end="", flush=True)
        for event in events:
            print(event.text, end="\n" if event.result else "", flush=True)
        prefix, seconds = event.result.prefix, event.result.time_to_first_token
        reason = f", {prefix.miss_reason.value}" if prefix.miss_reason else ""
        fetched = f", {prefix.fetched_tokens} of them fetched" if prefix.fetched_tokens else ""
        print(
            f"[{prefix.prompt_tokens} prompt tokens, {prefix.shared_tokens} shared, "
            f"{prefix.skipped_tokens} skipped{fetched}{reason}; first token after "
            f"{seconds * 1e3:.0f} ms]\n",
            file=sys.stderr,
        )
    if options.cache_dir:
        engine.save_cache()
    engine.close()
    return 0


def _explain(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.sampling_params import SamplingParams

    if options.cache_dir is not None and not Path(options.cache_dir).is_dir():
        raise ValueError(
            f"--cache-dir {options.cache_dir} is no folder: `generate --cache-dir` makes one"
        )
    *before, last = options.prompt
    with _engine(options) as engine:
        for prompt in before:
            engine.generate(prompt, SamplingParams(num_tokens_to_generate=0))
        print(engine.explain(last))
    return 0


_DEMO_NOTE = (
    "The demo model was trained on old books alone: it continues stories, it does not answer."
)


def _serve(options: argparse.Namespace) -> int:
    try:
        from megatron_hybrid.serving.run import log_json_lines, run, serve
    except ImportError as error:
        raise ImportError(f"{error}: serving needs pip install 'megatron_hybrid[serve]'") from error
    from megatron_hybrid.serving.service import ServingConfig

    config = _inference_config(options, max_requests=options.max_requests)
    keys = os.environ.get("MEGATRON_HYBRID_API_KEYS", "").split(",")
    serving = ServingConfig(
        options.served_model_name or Path(options.model).name,
        api_keys=tuple(filter(None, (*options.api_key, *keys))),
        description=_DEMO_NOTE if options.model == "demo" else "",
        admin_keys=tuple(options.admin_key),
        shows_prompts=options.show_prompts,
        shares_cache=options.share_cache,
        max_body_bytes=options.max_body_mib << 20,
        max_waiting=options.max_waiting,
        max_requests_per_key=options.max_requests_per_key,
        queue_seconds=options.queue_timeout,
        request_seconds=options.request_timeout,
        drain_seconds=options.shutdown_timeout,
    )
    log_json_lines()
    model, tokenizer = _load_for_chats(options)
    run(serve(model, tokenizer, config, serving, options.host, options.port))
    return 0


def _bench_serve(options: argparse.Namespace) -> int:
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

    if options.json:
        _check_file("--json", options.json)
    server = Server(options.base_url, options.api_key or os.environ.get("OPENAI_API_KEY"))
    calls = read_calls(
        options.prompts,
        options.model or server.first_model(),
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


def _chat(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.engine import DynamicInferenceEngine
    from megatron_hybrid.inference.sampling_params import SamplingParams
    from megatron_hybrid.tools.chat import chat, typed_lines

    params = SamplingParams(temperature=options.temperature, num_tokens_to_generate=options.tokens)
    config = _inference_config(options)
    with DynamicInferenceEngine(*_load_for_chats(options), config) as engine:
        chat(engine, typed_lines(), params, lambda text: print(text, end="", flush=True))
        if options.cache_dir:
            engine.save_cache()
    return 0


def _convert(options: argparse.Namespace) -> int:
    from megatron_hybrid.tools.convert import convert

    convert(
        options.source,
        options.target,
        options.to,
        options.dtype,
        huggingface_config=options.huggingface_config,
    )
    print(f"wrote {options.target}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from megatron_hybrid.training.run import train

    folder = options.folder or Path("runs") / Path(options.recipe).stem
    return train(options.recipe, options.overrides, Path(folder))


def _plan(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.plan import GB, parse_count, plan, read_model_config, render
    from megatron_hybrid.tools.roofline import device_of
    from megatron_hybrid.training.recipe import Recipe

    context = parse_count(options.context)
    memory = None if options.memory is None else round(options.memory * GB)
    device = device_of(options.device, memory, options.flops, options.bandwidth)
    if memory is None and device is None:
        raise ValueError("give --memory GB or --device NAME: what the model has to fit into")
    # "demo" is the model of the package, not its recipe.
    if options.model != "demo" and Recipe.path_of(options.model).suffix == ".yaml":
        config = Recipe.load(options.model).whole_model_config()
    else:
        config = read_model_config(options.model)
    memory = memory or device.memory_bytes
    result = plan(config, memory, context, options.state_encoding, device)
    print(json.dumps(result.to_dict(), indent=2) if options.json else render(result))
    return 0 if result.settings else 1


def _profile(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.plan import GB, read_model_config
    from megatron_hybrid.tools.plots import pyplot
    from megatron_hybrid.tools.profile import profile, read_requests
    from megatron_hybrid.tools.profile_report import draw, render

    if options.png:
        pyplot("--png")  # fail now, not after the replay
        _check_file("--png", options.png)
    config = read_model_config(options.model)
    requests = read_requests(options.prompts, options.model, config.vocab_size)
    result = profile(requests, config, round(options.memory * GB), options.state_encoding)
    print(json.dumps(result.to_dict(), indent=2) if options.json else render(result))
    if options.png:
        draw(result, options.png)
    return 0


def _check_file(option: str, path: str) -> None:
    if path.endswith("/") or Path(path).is_dir():
        raise ValueError(f"{option} {path} is a folder: give the name of a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder; make it first")


def _preprocess(options: argparse.Namespace) -> int:
    from functools import partial

    from megatron_hybrid.training.data.preprocess import preprocess, train_and_save_tokenizer

    if options.output is None and options.train_tokenizer is None:
        raise ValueError("--output PREFIX is missing: where to write the dataset")
    read = {"key": options.key, "one_per_line": options.one_per_line}
    if options.train_tokenizer is not None:
        if options.chat:
            raise ValueError("--train-tokenizer makes no chat template, which --chat needs")
        tokenizer = train_and_save_tokenizer(
            options.inputs, options.tokenizer, options.train_tokenizer, **read
        )
        print(f"wrote {options.tokenizer}: a tokenizer of {tokenizer.vocab_size} tokens")
        if options.output is None:
            return 0
    made = preprocess(
        options.inputs,
        options.tokenizer,
        options.output,
        workers=options.workers,
        chat=options.chat,
        append_eod=options.append_eod,
        skip_broken=options.skip_broken,
        tell=partial(print, file=sys.stderr),
        **read,
    )
    of_answers = f" ({made.answer_tokens:,} of answers)" if options.chat else ""
    left_out = f", {made.broken:,} left out" if made.broken else ""
    print(
        f"wrote {options.output}: {made.documents:,} documents, {made.tokens:,} tokens{of_answers}"
        f"{left_out}; {made.tokens / made.seconds:,.0f} tokens/s"
    )
    return 0


def _grafana(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.grafana import dashboard

    print(json.dumps(dashboard(), indent=2))
    return 0


def _info(options: argparse.Namespace) -> int:
    from megatron_hybrid.tools.info import backends, environment

    served = backends()  # first: it refuses an unknown MEGATRON_HYBRID_BACKEND
    for name, value in environment().items():
        print(f"{name:20}{value}")
    print(f"\n{'op':24}served by")
    for name, value in served.items():
        print(f"{name:24}{value}")
    return 0
