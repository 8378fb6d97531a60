"""`megatron-hybrid plan`."""

import argparse

from megatron_hybrid.commands.arguments import (
    ENGINE,
    PLANNED_MODEL_HELP,
    add_field,
    add_json,
    add_model,
    gigabytes,
    planned_config,
    positive,
    whole_number,
)

HELP = "Compute what a model needs on a device: KV, states, largest batch, best speed; or a run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, None, PLANNED_MODEL_HELP)
    parser.add_argument(
        "--memory",
        type=gigabytes,
        metavar="GB",
        help="Plan for a device with this much memory, in GB (10^9 bytes). This is needed without "
        "--device.",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="Plan for the memory of an a100, h100, h200 or b200, and compute bounds of the times "
        "of prefill and decode.",
    )
    parser.add_argument(
        "--flops",
        type=positive,
        metavar="TFLOPS",
        help="Assume that the device computes this many TFLOP/s (dense, bf16), in place of the "
        "value for --device.",
    )
    parser.add_argument(
        "--bandwidth",
        type=positive,
        metavar="TBS",
        help="Assume that the device reads this many TB/s of memory, in place of the value for "
        "--device.",
    )
    parser.add_argument(
        "--train",
        metavar="RECIPE",
        help="In place of a model, compute what this training recipe needs on each of its devices, "
        "by layer kind, and a bound of its speed.",
    )
    parser.add_argument(
        "--num-gpus", type=whole_number, default=8, metavar="N", help="GPUs of the run of --train."
    )
    parser.add_argument(
        "--context",
        default="8000",
        metavar="TOKENS",
        help="Plan for requests of this many tokens, such as 4096, 100k (100,000) or 1M.",
    )
    parser.add_argument(
        "--weights",
        choices=("fp8", "int8", "int4", "nvfp4"),
        help="Count the weights of the layers in this format, as megatron-hybrid quantize writes "
        "them. The default is the model's own format.",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=0,
        metavar="N",
        help="Count the states for the rollback of N drafts of each request (serve --speculation).",
    )
    parser.add_argument(
        "--mtp",
        action="store_true",
        help="Count the model's MTP head, too (serve --speculation mtp).",
    )
    parser.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="Count the memory of CUDA graphs of 64 requests, with drafts and without.",
    )
    add_field(parser, "--state-encoding", ENGINE, "state_encoding", metavar="ENCODING")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from megatron_hybrid.tools.plan import packed_folder, parse_count, plan, render
    from megatron_hybrid.tools.roofline import device_of
    from megatron_hybrid.utils.tables import GB

    context = parse_count(options.context)
    memory = None if options.memory is None else round(options.memory * GB)
    device = device_of(options.device, memory, options.flops, options.bandwidth)
    if memory is None and device is None:
        raise ValueError("give --memory GB or --device NAME: what the model has to fit into")
    memory = memory or device.memory_bytes
    if options.train is not None:
        return _plan_run(options, memory, device)
    config = planned_config(options.model, options.mtp)
    packed = packed_folder(options.model)
    result = plan(
        *(config, memory, context, options.state_encoding, device, packed, options.weights),
        *(options.num_speculative_tokens, options.cuda_graphs),
    )
    print(json.dumps(asdict(result), indent=2) if options.json else render(result))
    return 0 if result.settings else 1


def _plan_run(options: argparse.Namespace, memory_bytes: int, device) -> int:
    import json
    from dataclasses import asdict

    from megatron_hybrid.training.footprint import footprint
    from megatron_hybrid.training.recipe import Recipe
    from megatron_hybrid.training.trainer import model_config_of, tokenizer_of

    recipe = Recipe.load(options.train)
    if "vocab_size" in recipe.model and "pretrained" not in recipe.model:
        config = recipe.model_config(recipe.model["vocab_size"])
    else:
        config = model_config_of(recipe, tokenizer_of(recipe))
    found = footprint(recipe, config, options.num_gpus, "cuda")
    speed = None if device is None else found.tokens_per_second(device.flops, device.bandwidth)
    if options.json:
        values = {**asdict(found), "total": found.total, "tokens_per_second": speed}
        print(json.dumps(values, indent=2))
    else:
        print(found.render(memory_bytes))
        if speed is not None:
            print(f"\nat most {speed:,.0f} tokens/s on {options.num_gpus} {device.name}")
    return 0 if found.total <= memory_bytes else 1
