"""What is wrong in blocks of code, without running them."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from functools import cache
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

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
    python, found = PythonNames(), []
    for block in blocks:
        check: Callable[[str], Iterator[str]] = {
            "python": python.check,
            "bash": bash_errors,
            "yaml": _yaml_errors,
            "json": _json_errors,
        }.get(block.kind, lambda _: iter(()))
        found += [f"line {block.line}: {error}" for error in check(block.code)]
    return found


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


# Python ------------------------------------------------------------------------------------------


class PythonNames:
    """Names of ours in the Python blocks of a page, in order.

    Attributes:
        objects: name -> a module, a class or a function of the package.
        types: name -> the class of a value that was assigned to it.
    """

    def __init__(self):
        self.objects: dict[str, Any] = {}
        self.types: dict[str, type] = {}

    def check(self, code: str) -> Iterator[str]:
        """Names, attributes and keyword arguments of ours that are not there."""
        try:
            tree = compile(
                code, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
        except SyntaxError as error:
            yield f"{error}"
            return
        for statement in tree.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Import):
                    yield from self._import(node)
                elif isinstance(node, ast.ImportFrom):
                    yield from self._import_from(node)
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute):
                    yield from self._attribute(node)
                elif isinstance(node, ast.Call):
                    yield from self._call(node)
            for node in ast.walk(statement):
                if isinstance(node, ast.Assign):
                    self._assign(node.targets[0], self._type_of(node.value))
                elif isinstance(node, (ast.With, ast.AsyncWith)):
                    for item in node.items:
                        if item.optional_vars is not None:
                            self._assign(item.optional_vars, self._type_of(item.context_expr))

    def _import(self, node: ast.Import) -> Iterator[str]:
        for each in node.names:
            if each.name.partition(".")[0] == OURS:
                try:
                    module = import_module(each.name)
                except ImportError as error:
                    yield str(error)
                    continue
                self.objects[each.asname or OURS] = module if each.asname else import_module(OURS)

    def _import_from(self, node: ast.ImportFrom) -> Iterator[str]:
        if (node.module or "").partition(".")[0] != OURS:
            return
        for each in node.names:
            try:
                found = getattr(import_module(node.module), each.name)
            except (ImportError, AttributeError):
                if find_spec(f"{node.module}.{each.name}") is None:
                    yield f"{node.module} has no {each.name}"
                    continue
                found = import_module(f"{node.module}.{each.name}")
            self.objects[each.asname or each.name] = found

    def _assign(self, target: ast.expr, value: Any) -> None:
        value = _without_none(value)
        parts = get_args(value) if get_origin(value) is tuple else ()
        if isinstance(target, ast.Tuple) and len(parts) == len(target.elts):
            for each, part in zip(target.elts, parts):
                self._assign(each, part)
        elif isinstance(target, ast.Name):
            self.objects.pop(target.id, None)
            self.types.pop(target.id, None)
            if inspect.isclass(value) and value.__module__.startswith(OURS):
                self.types[target.id] = value

    def _value(self, node: ast.expr) -> Any:
        """An object of ours that an expression names; None: it is not known."""
        if isinstance(node, ast.Name):
            return self.objects.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            owner = self._type_of(node.value) if owner is None else owner
            if owner is not None:
                return inspect.getattr_static(owner, node.attr, None) or getattr(
                    owner, node.attr, None
                )
        return None

    def _type_of(self, node: ast.expr) -> Any:
        """The type of an expression's value; None: it is not known."""
        if isinstance(node, ast.Await):
            return self._type_of(node.value)
        if isinstance(node, ast.Name):
            return self.types.get(node.id)
        if isinstance(node, ast.Call):
            called = self._value(node.func)
            if inspect.isclass(called):
                return called
            called = getattr(called, "__func__", called)
            if inspect.isfunction(called):
                return _hints(called).get("return")
        return None

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        owner = self._value(node.value)
        kind = None if owner is not None else self._type_of(node.value)
        if inspect.ismodule(owner):
            if not hasattr(owner, node.attr) and not _is_module(f"{owner.__name__}.{node.attr}"):
                yield f"{owner.__name__} has no {node.attr}"
        elif inspect.isclass(owner) and not hasattr(owner, node.attr):
            yield f"{owner.__name__} has no {node.attr}"
        elif inspect.isclass(kind) and not _has(kind, node.attr):
            yield f"{kind.__name__} has no {node.attr}"

    def _call(self, node: ast.Call) -> Iterator[str]:
        called = self._value(node.func)
        called = getattr(called, "__func__", called)
        if not callable(called) or not getattr(called, "__module__", "").startswith(OURS):
            return
        parameters = inspect.signature(called).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return
        names = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in names:
                yield f"{called.__qualname__} has no argument {keyword.arg}"


@cache
def _hints(function: Callable) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError:  # of an import for type checkers alone
        return {}


def _without_none(hint: Any) -> Any:
    """`X | None` as X."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    is_optional = len(kinds) == 1 and type(None) in get_args(hint)
    return kinds[0] if is_optional else hint


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def _has(kind: type, name: str) -> bool:
    """Whether values of a class have an attribute: one of the class, or one that is assigned."""
    if hasattr(kind, name) or hasattr(kind, "__getattr__"):
        return True
    for base in kind.__mro__[:-1]:
        if name in inspect.get_annotations(base):
            return True
        if base.__module__.startswith(OURS) and re.search(
            rf"\bself\.{name}\b[^=]*=", inspect.getsource(base)
        ):
            return True
    return False


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
    commands: list[list[str]] = [[]]
    word: list[str] | None = None
    quote, place, skip = "", 0, False

    def end_word() -> None:
        nonlocal word, skip
        if word is not None and not skip:
            commands[-1].append("".join(word))
        skip = skip and word is None
        word = None

    while place < len(code):
        letter = code[place]
        if quote:
            if letter == quote:
                quote = ""
            elif letter == "\\" and quote == '"' and code[place + 1 : place + 2] in '"\\$`\n':
                place += 1
                word.append(code[place])
            else:
                word.append(letter)
        elif letter in "'\"":
            quote, word = letter, word or []
        elif letter == "\\":
            place += 1
            if code[place : place + 1] != "\n":
                word = (word or []) + [code[place : place + 1]]
        elif letter == "#" and word is None:
            place = code.find("\n", place)
            place = len(code) if place < 0 else place
            continue
        elif letter in "<>":
            if word is not None and "".join(word).isdigit():
                word = None
            end_word()
            skip = True
        elif letter == "&" and skip and word is None:
            pass  # as in 2>&1
        elif letter in ";|&\n()":
            end_word()
            skip = False
            commands.append([])
        elif letter.isspace():
            end_word()
        else:
            word = (word or []) + [letter]
        place += 1
    if quote:
        raise ValueError(f"the quote {quote} has no end")
    end_word()
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
        elif module.startswith("benchmarks") or module == f"{OURS}.serving.dynamo":
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
