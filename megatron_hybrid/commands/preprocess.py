"""`megatron-hybrid preprocess`."""

import argparse
import os
import sys

from megatron_hybrid.commands.arguments import read_text

HELP = "Turn texts or conversations into a dataset of tokens, for training."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        'A line of .jsonl is {"text": "..."}, or with --chat {"messages": [{"role": "user", '
        '"content": "..."}, ...]}. '
        "The command writes PREFIX.bin and PREFIX.idx (megatron-core's format) and PREFIX.json "
        "(the tokenizer that made them). Documents keep their order. Empty documents are left out "
        "and counted."
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="Read this file: .jsonl, .json, .txt, .md, any of them as .gz or .zst, .parquet, "
        ".arrow; a folder of Dataset.save_to_disk (Hugging Face); or -, JSONL of standard input.",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="FOLDER",
        help="Use the tokenizer in the folder of the model that is to be trained, or 'demo'.",
    )
    parser.add_argument(
        "--output",
        metavar="PREFIX",
        help="Write files whose names begin with this path. This is needed, except to train a "
        "tokenizer alone.",
    )
    parser.add_argument(
        "--key",
        metavar="FIELD",
        help="Read each document from this field of its line. The default is text, or messages "
        "with --chat.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="Encode in N processes.",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Read documents as conversations: the chat template writes them, and only answers "
        "have a training loss.",
    )
    parser.add_argument(
        "--preferences",
        action="store_true",
        help='Read documents as preferences, {"prompt": ..., "chosen": ..., "rejected": ...}, of '
        "texts or of lists of messages, for DPO.",
    )
    parser.add_argument(
        "--train-on",
        default="all",
        metavar="all|last|ROLE,...",
        help="With --chat, train all messages of the assistant, the last one, or all of these "
        'roles. In the input, "train": false or "weight": 0 in a message leaves it out, and its '
        'tokens count half with "weight": 0.5.',
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="With --chat, find answers by the {%% generation %%} blocks of this template, which "
        "has to write the same text as that of the tokenizer.",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="End each document with the end token. This is the default without --chat.",
    )
    parser.add_argument(
        "--one-per-line", action="store_true", help="Read each line of a text file as one document."
    )
    parser.add_argument(
        "--skip-broken",
        action="store_true",
        help="Leave out lines that are not documents or have more than 16 MiB, and count them. By "
        "default such a line ends the command.",
    )
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="TOKENS",
        help="First train a tokenizer (byte-level BPE) of this many tokens on the input, and write "
        "it to --tokenizer.",
    )


def run(options: argparse.Namespace) -> int:
    from functools import partial

    from megatron_hybrid.training.data.preprocess import preprocess, train_and_save_tokenizer

    marked = options.chat_template and read_text("--chat-template", options.chat_template)
    if not (options.chat or options.preferences) and (options.train_on != "all" or marked):
        raise ValueError("--train-on and --chat-template are for conversations: add --chat")
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
        preferences=options.preferences,
        append_eod=options.append_eod,
        skip_broken=options.skip_broken,
        train_on=options.train_on,
        training_template=marked,
        tell=partial(print, file=sys.stderr),
        **read,
    )
    of_answers = f" ({made.answer_tokens:,} of answers)" if made.answer_tokens else ""
    left_out = f", {made.empty:,} empty left out" if made.empty else ""
    left_out += f", {made.broken:,} broken left out" if made.broken else ""
    print(
        f"wrote {options.output}: {made.documents:,} documents, {made.tokens:,} tokens{of_answers}"
        f"{left_out}; {made.tokens / made.seconds:,.0f} tokens/s"
    )
    return 0
