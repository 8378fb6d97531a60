"""The command line: finds the command in `megatron_hybrid/commands/`, and runs it."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from textwrap import fill

from megatron_hybrid.commands.arguments import CommandParser, Parser
from megatron_hybrid.utils.other_names import advice
from megatron_hybrid.version import __version__

_NAMES = (
    *("demo", "generate", "chat", "serve", "explain", "profile", "plan"),
    *("doctor", "convert", "quantize", "preprocess", "train", "info"),
)
COMMANDS = {
    name: import_module(f"megatron_hybrid.commands.{name.replace('-', '_')}") for name in _NAMES
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return the exit status."""
    arguments, parser = sys.argv[1:] if arguments is None else arguments, build_parser()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    called = parser.parse_args(arguments)
    if called.command is None:
        parser.print_help(sys.stderr)
        return 2
    if (command := COMMANDS.get(called.command)) is None:
        remedy = advice(parser.prog, called.command, COMMANDS)
        remedy = remedy or f"the commands are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {called.command!r}: {remedy}")
    return reported(command.run, command_parser(called.command).read(called.arguments))


def reported(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a program with the options of a `CommandParser`, and return the exit status. Errors of
    the user are printed in one line, with the option of a field that the error begins with."""
    try:
        status = run(options)
        sys.stdout.flush()  # here, not at Python's exit, where errors are not caught
        return status
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, TypeError, OSError, ImportError) as error:
        option = options.option_of.get(str(error).partition(" ")[0], "")
        print(f"megatron-hybrid: {option}{option and ': '}{error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"megatron-hybrid: not enough memory on this machine: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> Parser:
    """Build the parser of a command's name. No parser needs torch."""
    lines = [
        fill(f"  {name:12}{command.HELP}", 80, subsequent_indent=" " * 14)
        for name, command in COMMANDS.items()
    ]
    parser = Parser(
        prog="megatron-hybrid",
        usage="megatron-hybrid [-h] [--version] COMMAND ...",
        description="Hybrid language models with prefix sharing at any token.",
        epilog="\n".join(
            ["commands:", *lines, "", "`megatron-hybrid COMMAND --help` lists a command's options."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def command_parser(name: str) -> CommandParser:
    """Build the parser of a command's arguments."""
    command = COMMANDS[name]
    parser = CommandParser(name, command.HELP)
    command.add_arguments(parser)
    return parser
