"""What is wrong in blocks of code, without running them."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from functools import cache
from glob import glob
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from doc_blocks import Block

from megatron_hybrid.cli import COMMANDS, command_parser
from megatron_hybrid.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
OURS = "megatron_hybrid"
FOLDERS = ("benchmarks", "examples", "tests", "docs", OURS)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*|\$\{?\w+\}?")
"""What a reader replaces: FOLDER, $PORT."""


def errors_of(blocks: Sequence[Block]) -> list[str]:
    """What is wrong in the blocks of one page, each with its line."""
    found = []
    for block in blocks:
        check: Callable[[str], Iterator[str]] = {
            "bash": bash_errors,
            "yaml": _yaml_errors,
            "json": _json_errors,
        }.get(block.kind, lambda _: iter(()))
        found += [f"line {block.line}: {error}" for error in check(block.code)]
    return found


def type_errors_of(pages: Mapping[str, Sequence[Block]], folder: Path) -> list[str]:
    """What pyright finds in the Python blocks of each page, one module a page, in `folder`."""
    for name, found in pages.items():
        lines: list[str] = []
        for block in found:
            if block.kind == "python":
                lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
        path = folder / name.replace("/", "_").replace(".md", ".py")
        path.write_text("\n".join(lines) + "\n")
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    said = subprocess.run(pyright, cwd=folder, stdout=subprocess.PIPE, check=False).stdout
    return [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']}"
        for each in json.loads(said)["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def _yaml_errors(code: str) -> Iterator[str]:
    try:
        list(yaml.safe_load_all(code))
    except yaml.YAMLError as error:
        yield str(error)


def _json_errors(code: str) -> Iterator[str]:
    try:
        json.loads(code)
    except ValueError as error:
        yield str(error)


# Shell -------------------------------------------------------------------------------------------


def bash_errors(code: str) -> Iterator[str]:
    """Commands of ours that their parsers refuse, and files and targets that are not there."""
    try:
        commands = split_commands(code)
    except ValueError as error:
        yield str(error)
        return
    for words in commands:
        yield from _command_errors(words)


def split_commands(code: str) -> list[list[str]]:
    """The words of each command, without comments, redirections and here-documents.

    Raises:
        ValueError: a quote has no end.
    """
    code = re.sub(r"<<-?'?(\w+)'?\n.*?\n\1$", "", code, flags=re.DOTALL | re.MULTILINE)
    quoted_or_comment = r"""('[^']*'|"(?:\\.|[^"\\])*")|(?<!\S)#[^\n]*"""
    code = re.sub(quoted_or_comment, lambda found: found[1] or "", code).replace("\\\n", " ")
    words = shlex.shlex(code, posix=True, punctuation_chars=";|&\n()<>")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    commands: list[list[str]] = [[]]
    redirects = False
    for word in words:
        if redirects:
            redirects = False
        elif set(word) <= set("<>&") and word.strip("&"):
            redirects = True
            if commands[-1] and commands[-1][-1].isdigit():
                commands[-1].pop()
        elif set(word) <= set(";|&\n()"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _command_errors(words: list[str]) -> Iterator[str]:
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("time", "nohup", "exec", "$")):
        words = words[1:]
    if not words:
        return
    program = Path(words[0]).name
    if program == "megatron-hybrid":
        yield from _cli_errors(words[1:])
    elif program == "make":
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words[1:]:
            if re.fullmatch(r"[a-z][\w.-]*", word) and word not in targets:
                yield f"the Makefile has no target {word}"
    elif "-m" in words[:-1]:
        at = words.index("-m") + 1
        yield from _module_errors(words[at], words[at + 1 :])
    else:
        script = next((word for word in words if word.endswith(".py")), None)
        if script is not None and (ROOT / script).is_file():
            source = (ROOT / script).read_text()
            yield from _missing_options(source, words[words.index(script) + 1 :], script)
    for word in words:
        if word.split("/")[0] in FOLDERS and "/" in word and not glob(str(ROOT / word)):
            yield f"{word} is not in the repository"


def _module_errors(module: str, arguments: list[str]) -> Iterator[str]:
    if module == OURS:
        yield from _cli_errors(arguments)
    elif module.partition(".")[0] in (OURS, "benchmarks", "examples"):
        path = ROOT.joinpath(*module.split("."))
        files = [*path.glob("__main__.py"), *path.parent.glob(f"{path.name}.py")]
        if not files:
            yield f"there is no module {module} to run"
        elif module.startswith("benchmarks") or module == f"{OURS}.dynamo":
            yield from _missing_options(files[0].read_text(), arguments, module)


def _missing_options(source: str, arguments: list[str], name: str) -> Iterator[str]:
    """Options that a script neither spells, nor can have from a command: its parser is made where
    it runs, and it may need a foreign package."""
    for word in arguments:
        option = word.partition("=")[0]
        if option.startswith("--") and f'"{option}"' not in source and option not in _options():
            yield f"{name} has no option {option}"


@cache
def _options() -> set[str]:
    actions = [action for name in COMMANDS for action in command_parser(name)._actions]
    return {option for action in actions for option in action.option_strings}


def _cli_errors(arguments: list[str]) -> Iterator[str]:
    if not arguments or arguments[0] in ("--help", "--version", "-h"):
        return
    name, *rest = arguments
    if name not in COMMANDS:
        if not _PLACEHOLDER.fullmatch(name):
            yield f"megatron-hybrid has no command {name}"
        return
    if "--help" not in rest:
        yield from _refusal(command_parser(name).read, rest)
        if name == "train" and rest and Recipe.path_of(rest[0]).is_file():
            overrides = [word for word in rest[1:] if re.match(r"[\w.]+=", word)]
            if not any(_PLACEHOLDER.search(each.partition("=")[2]) for each in overrides):
                yield from _refusal(lambda given: Recipe.load(rest[0], given), overrides)


def _refusal(read: Callable[[list[str]], Any], arguments: list[str]) -> Iterator[str]:
    """Why a parser refuses arguments, also with numbers for what a reader replaces."""
    said = StringIO()
    for given in (arguments, [_PLACEHOLDER.sub("1", word) for word in arguments]):
        try:
            with redirect_stderr(said):
                read(given)
            return
        except SystemExit:
            continue
        except ValueError as error:
            said.write(str(error))
    yield f"{' '.join(arguments)}: {said.getvalue().strip().splitlines()[-1]}"
