"""`megatron-hybrid explain`."""

import argparse
from pathlib import Path

from megatron_hybrid.commands.arguments import add_engine, add_prompts, make_engine

HELP = "Show how much of a prompt the cache would skip, and why not more."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(
        parser,
        "Explain this text. Of several prompts, the last one is explained after the others have "
        "been computed.",
    )
    add_engine(parser)


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.sampling_params import SamplingParams

    if options.cache_dir is not None and not Path(options.cache_dir).is_dir():
        raise ValueError(
            f"--cache-dir {options.cache_dir} is no folder: `generate --cache-dir` makes one"
        )
    *before, last = options.prompt
    with make_engine(options) as engine:
        for prompt in before:
            engine.generate(prompt, SamplingParams(num_tokens_to_generate=0))
        print(engine.explain(last))
    return 0
