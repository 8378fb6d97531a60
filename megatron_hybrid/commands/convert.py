"""`megatron-hybrid convert`."""

import argparse

from megatron_hybrid.commands.arguments import DTYPES, add_source_and_target

HELP = "Convert a checkpoint between this package, Hugging Face and Megatron-LM (torch_dist)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_and_target(
        parser,
        "Read this checkpoint folder, of any of these kinds. In the folder of a training run, the "
        "newest checkpoint is read.",
    )
    parser.add_argument(
        "--to",
        choices=("ours", "huggingface", "torch_dist"),
        default="ours",
        help="Write a checkpoint of this kind. ours is the form of this package; huggingface is "
        "that of the architecture that the model came from; torch_dist is for Megatron-LM, "
        "if megatron-core's GPT or hybrid models can hold the model.",
    )
    parser.add_argument(
        "--huggingface-config",
        metavar="FOLDER",
        help="Take the tokenizer and the size of the vocabulary from this folder, which has a "
        "Hugging Face model of the same architecture. --to huggingface needs this for "
        "weights that were trained here or by Megatron-LM.",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="Write weights in this number format. The default is the format of the source.",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.tools.convert import convert

    convert(options.source, options.target, options.to, options.dtype, options.huggingface_config)
    print(f"wrote {options.target}")
    return 0
