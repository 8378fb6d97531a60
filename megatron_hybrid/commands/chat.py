"""`megatron-hybrid chat`."""

import argparse
from functools import partial

from megatron_hybrid.commands.arguments import (
    MODELS_OWN,
    SAMPLING,
    add_chat_template,
    add_engine,
    add_field,
    inference_config,
    load_for_chats,
    whole_number,
)

HELP = "Talk to a model in the terminal, and see what each turn reuses."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine(parser)
    parser.add_argument(
        "--tokens",
        type=whole_number,
        default=256,
        metavar="N",
        help="Let each answer have at most N tokens.",
    )
    add_field(parser, "--temperature", SAMPLING, "temperature", f"{MODELS_OWN} 1.")
    add_chat_template(parser)


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.inference.engine import DynamicInferenceEngine
    from megatron_hybrid.inference.sampling_params import SamplingParams
    from megatron_hybrid.tools.chat import banner, chat, typed_lines

    write = partial(print, end="", flush=True)
    params = SamplingParams(temperature=options.temperature, num_tokens_to_generate=options.tokens)
    config = inference_config(options)
    with DynamicInferenceEngine(*load_for_chats(options), config) as engine:
        write(banner(engine, options.model))
        chat(engine, typed_lines(), params, write)
        if options.cache_dir:
            engine.save_cache()
    return 0
