"""`megatron-hybrid quantize`."""

import argparse
from pathlib import Path

HELP = "Write a model with weights of 8 or 4 bits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="Read this model folder, ours or Hugging Face's, or demo.",
    )
    parser.add_argument(
        "target", metavar="TARGET", help="Write to this folder, which must be new or empty."
    )
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
        type=int,
        default=2048,
        metavar="N",
        help="Compare them on this many tokens of the text.",
    )
    parser.add_argument(
        "--device", help="Compare them on this device, such as cuda. The default is the CPU."
    )


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.checkpoints.pretrained import checked_device
    from megatron_hybrid.tools.quantize import compare, quantize, render

    if options.device is not None:
        if options.text is None:
            raise ValueError("--device is where models are compared, which needs --text FILE")
        checked_device(options.device)
    text = None if options.text is None else Path(options.text).read_text(encoding="utf-8")
    report = quantize(options.source, options.target, options.to)
    if text is not None:
        report.text = compare(options.source, options.target, text, options.tokens, options.device)
    print(render(report))
    print(f"wrote {options.target}")
    return 0
