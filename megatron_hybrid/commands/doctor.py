"""`megatron-hybrid doctor`."""

import argparse
from textwrap import fill

from megatron_hybrid.commands.arguments import add_model

HELP = "Examine a model's folder or config.json: what it is, and whether it loads."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, None, "Examine this checkpoint folder, this config.json, or 'demo'.")


def run(options: argparse.Namespace) -> int:
    from megatron_hybrid.checkpoints.pretrained import model_folder
    from megatron_hybrid.serving.parsers.choice import shown_tool_parser, style_of
    from megatron_hybrid.tools.doctor import examine

    rows, tokenizer, refusal = examine(options.model)
    if tokenizer is None:
        rows.append(("tokenizer", "none was read"))
    elif (template := tokenizer.chat_template) is None:
        rows.append(("tokenizer", "without a chat template"))
    else:
        rows.append(("tokenizer", "with a chat template"))
        rows.append(("tool calls", f"--tool-call-parser {shown_tool_parser(template)}"))
        thoughts = style_of(template).thoughts
        rows.append(("reasoning", f"in {thoughts.open}" if thoughts else "none in the template"))
    files = "they fit" if model_folder(options.model).is_dir() else "config.json alone was read"
    rows.append(("files", "" if refusal else files))
    rows.append(("loads", f"no: {refusal}" if refusal else "yes"))
    for name, text in rows:
        text = text if text.isprintable() else ascii(text)
        if text:
            print(fill(f"{name:16}{text}", 80, subsequent_indent=" " * 16, break_on_hyphens=False))
    return 1 if refusal else 0
