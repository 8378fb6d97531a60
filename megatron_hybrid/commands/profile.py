"""`megatron-hybrid profile`."""

import argparse

from megatron_hybrid.commands.arguments import (
    ENGINE,
    PLANNED_MODEL_HELP,
    add_field,
    add_json,
    add_model,
    gigabytes,
    planned_config,
)

HELP = "Replay your own prompts, and compare how much several prefix caches would skip."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        metavar="PROMPTS",
        help="Read prompts from this JSONL file. Each line has a `prompt` (a text, token ids or a "
        "chat's messages, with `tools` if it has any), and, where they are known, `output`, "
        "`session` (the name of a conversation), `turn` (a number in it) and `arrival` (seconds).",
    )
    add_model(parser, None, f"{PLANNED_MODEL_HELP} Prompts that are texts need its tokenizer.")
    parser.add_argument(
        "--memory",
        type=gigabytes,
        required=True,
        metavar="GB",
        help="Give each cache this much memory, in GB (10^9 bytes).",
    )
    add_field(parser, "--state-encoding", ENGINE, "state_encoding", metavar="ENCODING")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    import json

    from megatron_hybrid.tools.profile import profile, read_requests, render
    from megatron_hybrid.utils.tables import GB

    config = planned_config(options.model)
    requests = read_requests(options.prompts, options.model, config.vocab_size)
    result = profile(requests, config, round(options.memory * GB), options.state_encoding)
    print(json.dumps(result.to_dict(), indent=2) if options.json else render(result))
    return 0
