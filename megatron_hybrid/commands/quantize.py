"""`megatron-hybrid quantize`."""

import argparse

from megatron_hybrid.commands.arguments import add_source_and_target, read_text, whole_number

HELP = "Write a model with weights of 8 or 4 bits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, "Read this model folder, ours or Hugging Face's, or demo.")
    parser.add_argument(
        "--to",
        required=True,
        choices=("fp8", "int8", "int4", "nvfp4"),
        help="Round weights to this format. fp8 and int8 have a scale for each row, int4 has one "
        "for up to 128 numbers of a row, nvfp4 one for 16. A Hugging Face folder is written "
        "in the format of compressed-tensors.",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="Compare both models on the text in this file, by KL divergence and perplexity.",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number,
        default=2048,
        metavar="N",
        help="Compare them on this many tokens of the text.",
    )
    parser.add_argument(
        "--device", help="Compare them on this device, such as cuda. The default is the CPU."
    )


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.checkpoints.pretrained import checked_device, checked_folder
    from megatron_hybrid.text.tokenizer import Tokenizer
    from megatron_hybrid.tools.quantize import compare, quantize, render

    if options.device is not None:
        checked_device(options.device)
        if options.text is None:
            raise ValueError("--device is where models are compared, which needs --text FILE")
    ids = []
    if options.text is not None:
        text = read_text("--text", options.text)
        ids = Tokenizer.from_folder(checked_folder(options.source)).tokenize(text)[: options.tokens]
        if len(ids) < 2:
            raise ValueError(f"--text and --tokens leave {len(ids)} tokens: compare at least 2")
    report = quantize(options.source, options.target, options.to)
    if ids:
        report.text = compare(options.source, options.target, ids, options.device)
    print(render(report))
    print(f"wrote {options.target}")
    return 0
