"""Names of other libraries for what has another name here. Errors, docs/reference/other_names.md
and tests are made from one table, other_names.toml."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron_hybrid.utils.field_help import fields_help

T = TypeVar("T")
PROGRAM = "megatron-hybrid "
CONFIGS = {
    "SamplingParams": "megatron_hybrid.inference.sampling_params.SamplingParams",
    "RequestOptions": "megatron_hybrid.inference.requests.options.RequestOptions",
    "InferenceConfig": "megatron_hybrid.inference.config.InferenceConfig",
}
_LOADER = "load_pretrained"
SECTIONS = ("run", "optimizer", "data", "checkpoints", "reports", "model", "lora", "the recipe")


class Target(NamedTuple):
    """A name that is there, such as that of `InferenceConfig.max_requests`."""

    owner: str
    """A class of CONFIGS, load_pretrained, a section of a recipe, or a command; "": every command
    that has the option."""
    name: str
    value: str
    """The value that it is to have; "": one's own."""

    @classmethod
    def read(cls, text: str) -> Target:
        path, _, value = text.partition("=")
        owner, dot, name = path.partition(".")
        return cls(owner, name, value) if dot else cls("", path, value)

    @property
    def is_option(self) -> bool:
        return self.name.startswith("--")

    @property
    def setting(self) -> str:
        """The name, and the value that it is to have."""
        return f"{self.name}={self.value}" if self.value else self.name


class Row(NamedTuple):
    """One row of the table."""

    targets: tuple[Target, ...]
    """What is to be used; empty: there is nothing, and `text` is the advice."""
    text: str
    """The end of the sentence, or the whole of it."""
    place: str | None
    """The only place where the row holds; None: it holds everywhere."""
    libraries: dict[str, tuple[str, ...]]
    """Library -> its names."""


@functools.cache
def rows() -> tuple[Row, ...]:
    """Read the table."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    found = []
    for row in tomllib.loads(text)["name"]:
        targets = tuple(map(Target.read, row.pop("here", "").split()))
        text = row.pop("more", "") if targets else row.pop("advice")
        place = row.pop("at", None)
        libraries = {library: tuple(names.split()) for library, names in row.items()}
        found.append(Row(targets, text, place, libraries))
    return tuple(found)


def advice(place: str, name: str, known: Collection[str]) -> str | None:
    """Return what to do in place of an unknown name; None: nothing is known of it.

    Args:
        place: where it was given: a class of CONFIGS, load_pretrained, a section of a recipe, or
            `megatron-hybrid` with a command.
        name: a field, or an option.
        known: the names that are there.
    """
    field = _field(name)
    is_of_table = place in (*CONFIGS, _LOADER, *SECTIONS) or place.startswith(PROGRAM)
    foreign, ours = _rows_of(field) if is_of_table else ((), ())
    for row in foreign:
        if row.place in (None, place):
            return f"{_use(place, row.targets, known)}{row.text}" if row.targets else row.text
    if ours:  # the right name, in a wrong place
        return _use(place, ours[0].targets, known)
    own = [Target(owner, field, "") for owner, of in CONFIGS.items() if field in fields_help(of)]
    if own and is_of_table:
        return _use(place, own, known)
    near = _near(name, known)
    return f"did you mean {near}?" if near else None


@functools.cache
def _rows_of(field: str) -> tuple[list[Row], list[Row]]:
    """Return the rows of a name of another library, and those of a name of ours."""
    foreign = [row for row in rows() if field in chain.from_iterable(row.libraries.values())]
    ours = [row for row in rows() if field in (_field(target.name) for target in row.targets)]
    return foreign, ours


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _use(place: str, targets: Iterable[Target], known: Collection[str]) -> str:
    """Return the sentence that gives the targets their best form at a place."""
    command = place.removeprefix(PROGRAM) if place.startswith(PROGRAM) else None
    mine = [t for t in targets if t.name in known and t.owner in ("", command, place, _LOADER)]
    if mine:
        return f"use {' and '.join(target.setting for target in mine)}"
    rest = [target for target in targets if target.owner]
    if command == "serve" and rest[0].owner in ("SamplingParams", "RequestOptions"):
        return "give it with each request"
    in_recipe = [target for target in rest if target.owner in SECTIONS]
    outside = [target for target in rest if target not in in_recipe]
    trains = command == "train" or place in SECTIONS
    chosen = (in_recipe or outside) if trains else (outside or in_recipe)
    return f"use {', or '.join(_elsewhere(chosen, in_python=command is None or trains))}"


def _elsewhere(targets: Iterable[Target], in_python: bool) -> Iterator[str]:
    """Yield for each owner how its targets are written. in_python: it is clear which of them are
    Python."""
    for owner, group in groupby(targets, lambda target: target.owner):
        names = list(group)
        if names[0].is_option:
            yield f"`{PROGRAM}{owner} {' '.join(target.setting for target in names)}`"
        elif owner in SECTIONS:
            yield f"the recipe's {' and '.join(f'{owner}.{target.name}' for target in names)}"
        else:
            settings = (f"{target.name}={target.value or '...'}" for target in names)
            yield f"{owner}({', '.join(settings)}){'' if in_python else ' in Python'}"


def _near(name: str, known: Iterable[str]) -> str | None:
    """Return the one of the known names that `name` is a typing error of, or the beginning of; None
    if there is none, or several."""
    begun = [one for one in known if one.startswith(name) and 5 * len(name) >= 3 * len(one)]
    found = begun or [one for one in known if _is_slip(name, one)]
    return found[0] if len(found) == 1 else None


def _is_slip(name: str, meant: str) -> bool:
    """Return whether one letter is missing, too much or wrong, or swapped with the next."""
    if abs(len(name) - len(meant)) > 1:
        return False
    start = _num_shared(name, meant)
    given, wanted = name[start:][::-1], meant[start:][::-1]
    end = _num_shared(given, wanted)
    given, wanted = given[end:], wanted[end:]
    return max(len(given), len(wanted)) <= 1 or (len(given) == 2 and given == wanted[::-1])


def _num_shared(one: str, other: str) -> int:
    """Return how many letters two names begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def names_fields(owner: type[T]) -> type[T]:
    """Make a dataclass answer an unknown field with the right one, in a TypeError."""
    make = owner.__init__
    known = [name for name in inspect.signature(make).parameters if name != "self"]

    @functools.wraps(make)
    def checked(self: Any, *values: Any, **given: Any) -> None:
        for name in given.keys() - set(known):
            remedy = advice(owner.__name__, name, known) or f"its fields are {', '.join(known)}"
            raise TypeError(f"{owner.__name__} has no field {name!r}: {remedy}")
        make(self, *values, **given)

    owner.__init__ = checked  # type: ignore[method-assign]
    return owner


def table() -> str:
    """Return docs/reference/other_names.md's table."""
    lines = ["| name, of | do this |", "| --- | --- |"]
    for row in rows():
        fields = [target for target in row.targets if not target.is_option]
        options = [target for target in row.targets if target.is_option]
        uses = [*_elsewhere(fields, in_python=True), *(_option(target) for target in options)]
        names: dict[str, list[str]] = {}
        for library, given in row.libraries.items():
            for name in given:
                names.setdefault(name, []).append(library)
        theirs = "; ".join(f"`{name}`, {', '.join(of)}" for name, of in names.items())
        lines.append(f"| {theirs} | {', '.join(uses)}{row.text} |")
    return "\n".join(lines)


def _option(target: Target) -> str:
    of = f"{PROGRAM}{target.owner} " if target.owner else ""
    return f"`{of}{target.setting}`"
