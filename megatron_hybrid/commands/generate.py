"""`megatron-hybrid generate`."""

import argparse
import sys
from typing import Any

from megatron_hybrid.commands.arguments import (
    MODELS_OWN,
    SAMPLING,
    add_engine,
    add_field,
    add_prompts,
    make_engine,
)

HELP = "Continue your own text, and show how much of it the cache reused."
_SAMPLING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "num_tokens_to_generate": ("--tokens", f"{MODELS_OWN} 30.", {"metavar": "N"}),
    "temperature": ("--temperature", f"{MODELS_OWN} 1.", {}),
    "top_k": ("--top-k", f"{MODELS_OWN} 0.", {"metavar": "K"}),
    "top_p": ("--top-p", f"{MODELS_OWN} 0.", {"metavar": "P"}),
    "seed": ("--seed", "", {}),
}
"""Fields of SamplingParams -> the option of each, its default, and its `add_argument`'s rest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(
        parser,
        "Continue this text. Several prompts run one after the other, and each reuses what the "
        "cache has of those before it.",
    )
    for field, (option, default, given) in _SAMPLING.items():
        add_field(parser, option, SAMPLING, field, default, dest=field, **given)
    add_engine(parser)


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.sampling_params import SamplingParams
    from megatron_hybrid.tools.chat import reuse_of

    params = SamplingParams(**{field: getattr(options, field) for field in _SAMPLING})
    with make_engine(options) as engine:
        for prompt in options.prompt:
            events = engine.stream(prompt, params)  # an impossible request is refused here
            print(prompt, end="", flush=True)
            for event in events:
                print(event.text, end="\n" if event.result else "", flush=True)
            print(f"{reuse_of(event.result)}\n", file=sys.stderr)
        if options.cache_dir:
            engine.save_cache()
    return 0
