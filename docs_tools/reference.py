"""The generated parts of reference pages: what `<!-- generated: KIND ... -->` in a page stands for.

command_line        every command, from its parser
fields CLASS        the fields that a class declares itself
config_groups CLASS the fields of a class's bases, with a heading for each base
metrics             the metrics of an engine, from the tables that /metrics is made of
file PATH           a Markdown file outside of docs/, without its title; for pages of docs/reference
nothing             nothing: the sentence is for readers of a clone alone
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from os.path import normpath
from pathlib import PurePosixPath

from docs_tools.source import ROOT, Class, read_class, table
from megatron_hybrid.cli import COMMANDS, command_parser
from megatron_hybrid.utils.other_names import PROGRAM, Target, in_words
from megatron_hybrid.utils.other_names import rows as other_names_rows

MARK = re.compile(r"^<!-- generated: (\w+) ?([\w./]*) -->.*$", re.MULTILINE)
"""With a sentence after it, for readers of a clone."""
PAGES_OF_FILES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
"""A file -> the page of docs/reference that shows it."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_METRICS = "megatron_hybrid.inference.metrics.prometheus"


def expand(markdown: str) -> str:
    """A page with what its marks stand for."""
    makers = {
        "command_line": lambda _: command_line(),
        "fields": lambda name: fields_table(read_class(name), is_json=".serving." in name),
        "config_groups": config_groups,
        "metrics": lambda _: metrics(),
        "file": file,
        "nothing": lambda _: "",
    }
    return MARK.sub(lambda found: makers[found[1]](found[2]), markdown)


def command_line() -> str:
    """A heading, the usage and a table of options for each command."""
    parts = []
    for name, command in COMMANDS.items():
        parser = command_parser(name)
        parts.append(f"## {name}\n\n{escaped(command.HELP)}\n")
        rows = [_option(action) for action in parser._actions if action.help != argparse.SUPPRESS]
        parts.append(rows_table(("argument", "default", "meaning"), [row for row in rows if row]))
        if parser.epilog:
            parts.append(f"{escaped(parser.epilog)}\n")
    return "\n".join(parts)


def _option(action: argparse.Action) -> tuple[str, str, str] | None:
    if action.dest == "help":
        return None
    values = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices and not action.metavar:
        values = "|".join(map(str, action.choices))
    values = " ".join(values) if isinstance(values, tuple) else values
    names = ", ".join(action.option_strings)
    shown = f"{names} {values}".strip() + (" ..." if action.nargs in ("*", "+") else "")
    is_shown = action.default not in (None, False, [], "", argparse.SUPPRESS, float("inf"))
    about = (action.help or "") % {**vars(action), "prog": "megatron-hybrid"}
    return code(shown), code(action.default) if is_shown else "", escaped(about)


def config_groups(dotted: str) -> str:
    """A heading and a table for each base of a class that declares fields."""
    parts = []
    for base in read_class(dotted).bases:
        if not base.endswith("Fields"):  # megatron-core's, which has docs of its own
            continue
        group = read_class(base)
        title, _, rest = " ".join(group.about.partition("\n\n")[0].split()).partition(".")
        if group.fields:
            parts.append(f"### {title}\n\n{escaped(rest)}\n\n{fields_table(group)}")
    return "\n".join(parts)


def fields_table(of: Class, is_json: bool = False) -> str:
    """A row for each field. is_json: callers write its values as JSON."""

    def shown(text: str) -> str:
        return code(re.sub(r"\b(None|True|False)\b", _in_json, text) if is_json else text)

    has_text = any(field.about for field in of.fields)
    heads = ("field", "type", "default", *(("meaning",) if has_text else ()))
    rows = []
    for field in of.fields:
        default = "needed" if field.default is None else shown(field.default)
        about = (escaped(field.about),) if has_text else ()
        rows.append((code(field.name), shown(field.type), default, *about))
    return rows_table(heads, rows)


def _in_json(value: re.Match) -> str:
    return {"None": "null", "True": "true", "False": "false"}[value[0]]


def metrics() -> str:
    """Counters, gauges, histograms, and the second names of those that vLLM has, too."""
    prefix, seconds = table(_METRICS, "PREFIX"), table(_METRICS, "VLLM_NAMES")
    vllm = table(_METRICS, "VLLM_PREFIX")
    parts, kinds = [], {}
    for kind, suffix in (("COUNTERS", "_total"), ("GAUGES", ""), ("HISTOGRAMS", "")):
        known = table(_METRICS, kind)
        kinds |= dict.fromkeys(known, suffix)
        rows = [(code(f"{prefix}{key}{suffix}"), escaped(text)) for key, text in known.items()]
        parts.append(f"## {kind.capitalize()}\n\n{rows_table(('metric', 'meaning'), rows)}")
    rows = [
        (
            code(f"{vllm}{name}{kinds[keys[0]] if len(keys) == 1 else ''}"),
            " / ".join(code(f"{prefix}{key}{kinds[key]}") for key in keys),
        )
        for name, keys in seconds.items()
    ]
    parts.append(f"## Names of vLLM\n\n{rows_table(('metric', 'the same as'), rows)}")
    return "\n".join(parts)


def file(path: str) -> str:
    """A file without its title. Its links lead to pages of the site; a link to another file of the
    repository is the path of that file."""

    def link(found: re.Match) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target:
            return found[0]
        place = normpath(PurePosixPath(path).parent / target)
        if place in PAGES_OF_FILES:
            return f"[{text}]({PAGES_OF_FILES[place]}{anchor})"
        if place.startswith("docs/"):
            return f"[{text}](../{place.removeprefix('docs/')}{anchor})"
        return code(place + "/" * (ROOT / place).is_dir())

    text = (ROOT / path).read_text(encoding="utf-8")
    return _LINK.sub(link, text.partition("\n")[2].strip())


def other_names() -> str:
    """The table of docs/reference/other_names.md: names of other libraries, and what to do."""
    found = []
    there = {option for name in COMMANDS for option in command_parser(name)._option_string_actions}
    for row in other_names_rows():
        fields = [target for target in row.targets if not target.is_option]
        options = [target for target in row.targets if target.is_option]
        of_fields = [f"`{field.option}`" for field in fields if field.option in there]
        uses = [*in_words(fields, in_python=True), *of_fields, *map(_option_of, options)]
        names: dict[str, list[str]] = {}
        for library, given in row.libraries.items():
            for name in given:
                names.setdefault(name, []).append(library)
        theirs = "; ".join(f"`{name}`, {', '.join(of)}" for name, of in names.items())
        found.append((theirs, f"{', '.join(uses)}{row.text}"))
    return rows_table(("name, of", "do this"), found)


def _option_of(target: Target) -> str:
    return f"`{PROGRAM}{target.owner} {target.setting}`" if target.owner else f"`{target.setting}`"


def rows_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(value: object) -> str:
    """Text in backticks that may stand in a cell."""
    text = str(value).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def escaped(text: str) -> str:
    """Text of a docstring or a help, for a cell: what is not between backticks is no Markdown."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"([*_\[\]])", r"\\\1", parts[place]).replace("<", "&lt;")
    return "".join(parts).replace("|", "\\|")
