"""`megatron-hybrid generate`."""

import argparse
import sys

from megatron_hybrid.commands.arguments import PYTHON_NAMES, add_engine, add_prompts, make_engine

HELP = "Continue your own text, and show how much of it the cache reused."
_DEFAULT = "The default is the model's own (generation_config.json), else"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = PYTHON_NAMES
    add_prompts(
        parser,
        "Continue this text. Several prompts run one after the other, and each reuses what the "
        "cache has of those before it.",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"Generate at most N tokens (num_tokens_to_generate). {_DEFAULT} 30.",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="Divide the logits by this before a token is drawn; 0 always takes the most "
        f"likely token. {_DEFAULT} 1.",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help=f"Draw from the K most likely tokens; 0 draws from all. {_DEFAULT} 0.",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="Draw from the most likely tokens whose probabilities add up to P; 0 draws from all. "
        f"{_DEFAULT} 0.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="Draw the tokens of every answer from this seed. By default each prompt has its own "
        "seed, which is the same in every run.",
    )
    add_engine(parser)


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        num_tokens_to_generate=options.tokens,
    )
    engine = make_engine(options)
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
