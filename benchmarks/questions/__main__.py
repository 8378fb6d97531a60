"""`python -m benchmarks.questions NAME`: a question about caches, answered by a run on a CPU."""

import argparse
import platform
import re
from datetime import date
from importlib import import_module
from itertools import chain
from pathlib import Path

import torch

PAGES = Path(__file__).parents[2] / "docs" / "measured" / "questions"
NAMES = (
    "cheaper_when_longer",
    "no_alignment_flags",
    "windows_keep_their_prefix",
    "memory_only_or_restore",
    "memory_at_100k",
    "state_dtypes",
)
_OUTPUT = re.compile(r"(?<=\n```text\n).*?(?=```\n)", re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    modules = {name: import_module(f"benchmarks.questions.{name}") for name in NAMES}
    listed = "\n".join(f"  {name}: {modules[name].__doc__.split('?')[0]}?" for name in NAMES)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.questions",
        description=f"{__doc__}\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    parser.add_argument(
        "--write", action="store_true", help="Also write the table into the page of the docs."
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    printed = []
    for line in chain((machine(), ""), modules[options.name].run()):
        print(line, flush=True)
        printed.append(line)
    if options.write:
        page = PAGES / f"{options.name}.md"
        text = page.read_text(encoding="utf-8")
        table = "\n".join([*printed, ""])
        page.write_text(_OUTPUT.sub(lambda _: table, text, count=1), encoding="utf-8")


def machine() -> str:
    """The day, and what it ran on."""
    return f"{date.today()}, {platform.machine()}, one thread, torch {torch.__version__}"


if __name__ == "__main__":
    main()
