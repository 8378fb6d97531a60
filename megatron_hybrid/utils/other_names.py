"""Names in other libraries of things that have another name here. Errors, tests and
docs/reference/other_names.md are made from one table, other_names.toml."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain, groupby
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from megatron_hybrid.utils.field_help import fields_help

E = TypeVar("E", bound=Callable[..., Any])
T = TypeVar("T", bound=type)
PROGRAM = "megatron-hybrid "
CONFIGS = {
    "SamplingParams": "megatron_hybrid.inference.sampling_params.SamplingParams",
    "RequestOptions": "megatron_hybrid.inference.requests.options.RequestOptions",
    "InferenceConfig": "megatron_hybrid.inference.config.InferenceConfig",
}
_OF_MODEL = ("load_pretrained", "HybridConfig")
_ENTRY = "()"
"""End of the place of a function's arguments."""
REQUEST = "request"
"""The place of the fields of an HTTP request's body."""
SECTIONS = (
    *("run", "optimizer", "data", "checkpoints", "reports", "lora", "dpo", "grpo"),
    *("model", "the recipe"),
)


class Target(NamedTuple):
    """A name of this package, such as that of `InferenceConfig.max_requests`."""

    owner: str
    """A class of CONFIGS, one of _OF_MODEL, a section of a recipe, a command, or REQUEST, or "" for
    every command that has the option."""
    name: str
    value: str
    """The value that it is to have, or "" for the user's own."""

    @classmethod
    def read(cls, text: str) -> Target:
        path, _, value = text.partition("=")
        owner, dot, name = path.partition(".")
        return cls(owner, name, value) if dot else cls("", path, value)

    @property
    def is_option(self) -> bool:
        return self.name.startswith("--")

    @property
    def option(self) -> str:
        """The option of the same name, which sets it where a command has it, or ""."""
        is_field = self.owner in (*CONFIGS, *_OF_MODEL) and not self.value
        return f"--{self.name.replace('_', '-')}" if is_field else ""

    @property
    def setting(self) -> str:
        """The name, and the value that it is to have."""
        return f"{self.name}={self.value}" if self.value else self.name


class Row(NamedTuple):
    """One row of the table."""

    targets: tuple[Target, ...]
    """Names to use instead. If there are none, `text` is the advice."""
    text: str
    """The end of the sentence, or the whole of it."""
    places: tuple[str, ...]
    """The only places where the row holds. If there are none, it holds everywhere."""
    libraries: dict[str, tuple[str, ...]]
    """Library -> its names."""
    is_asked: bool
    """Whether a request may ask for it."""


@functools.cache
def rows() -> tuple[Row, ...]:
    """Read the table."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    found = []
    kinds = tomllib.loads(text).items()
    for is_asked, row in ((kind == "answer", row) for kind, table in kinds for row in table):
        targets = tuple(map(Target.read, row.pop("here", "").split()))
        text = row.pop("more", "") if targets else row.pop("advice")
        places = tuple(row.pop("at", ()))
        libraries = {library: tuple(names.split()) for library, names in row.items()}
        found.append(Row(targets, text, places, libraries, is_asked))
    return tuple(found)


def advice(place: str, name: str, known: Collection[str]) -> str | None:
    """Return what to do in place of an unknown name, or None if nothing is known about it.

    Args:
        place: where it was given: a class of fields, a function with `()`, a section of a recipe,
            or `megatron-hybrid` with a command.
        name: an argument, a field, or an option.
        known: the existing names.
    """
    field, given_at = _field(name), place.removesuffix(_ENTRY)
    is_of_table = given_at != place or place in (*CONFIGS, *_OF_MODEL, *SECTIONS, REQUEST)
    if is_of_table or place.startswith(PROGRAM):
        foreign, ours = _rows_of(field)
        for row in foreign:
            if _holds(row, given_at):
                use = _use(given_at, row.targets, known) if row.targets else ""
                return None if use is None else use + row.text
        own = [Target(name, field, "") for name, of in CONFIGS.items() if field in fields_help(of)]
        exact = ([t for t in row.targets if _field(t.name) == field] for row in ours)
        # The right name, in a wrong place.
        for targets in (*exact, *(row.targets for row in ours), own):
            if use := _use(given_at, targets, known):
                return use
    near = None if place == REQUEST else _near(name, known)
    return f"did you mean {near}?" if near else None


def names_in_requests() -> Iterator[str]:
    """Yield all names of other libraries that a request may have."""
    for row in rows():
        if _holds(row, REQUEST):
            yield from chain.from_iterable(row.libraries.values())


def _holds(row: Row, place: str) -> bool:
    if row.places:
        return not {place, place.rpartition(".")[2]}.isdisjoint(row.places)
    return row.is_asked or place != REQUEST


@functools.cache
def _rows_of(field: str) -> tuple[list[Row], list[Row]]:
    """Return the rows that have a name for another library, those of certain places first, and the
    rows that have it as a name of ours."""
    foreign = [row for row in rows() if field in chain.from_iterable(row.libraries.values())]
    foreign.sort(key=lambda row: not row.places)
    ours = [row for row in rows() if field in (_field(target.name) for target in row.targets)]
    return foreign, ours


def _field(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _use(place: str, targets: Iterable[Target], known: Collection[str]) -> str | None:
    """Return the advice to use the targets, in the best form for a place, or None if nothing helps
    there."""
    command = place.removeprefix(PROGRAM) if place.startswith(PROGRAM) else None
    owners = {"", command, place, *_OF_MODEL, *(CONFIGS if place == REQUEST else ())}
    mine = [t.setting for t in targets if t.name in known and t.owner in owners]
    mine += [target.option for target in targets if target.option in known]
    if mine:
        return f"use {' and '.join(dict.fromkeys(mine))}"
    rest = [target for target in targets if target.owner not in ("", REQUEST)]
    if command == "serve" and rest and rest[0].owner in ("SamplingParams", "RequestOptions"):
        return "give it with each request"
    in_recipe = [target for target in rest if target.owner in (*SECTIONS, "train")]
    outside = [target for target in rest if target not in in_recipe]
    trains = command == "train" or place in SECTIONS
    chosen = in_recipe if trains else (outside or in_recipe)
    if not chosen or place == REQUEST:
        return None
    return f"use {', or '.join(in_words(chosen, in_python=command is None))}"


def in_words(targets: Iterable[Target], in_python: bool) -> Iterator[str]:
    """Yield for each owner how its targets are written. in_python: whether the reader is in Python,
    so that this is not said."""
    for owner, group in groupby(targets, lambda target: target.owner):
        names = list(group)
        if names[0].is_option:
            yield f"`{PROGRAM}{owner} {' '.join(target.setting for target in names)}`"
        elif owner == REQUEST:
            yield f"a request's {' or '.join(target.setting for target in names)}"
        elif owner in SECTIONS:
            yield f"the recipe's {' and '.join(f'{owner}.{target.name}' for target in names)}"
        else:
            settings = (f"{target.name}={target.value or '...'}" for target in names)
            yield f"{owner}({', '.join(settings)}){'' if in_python else ' in Python'}"


def _near(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is a typing error or the beginning of, or None if there is
    none, or several."""
    begun = [one for one in known if one.startswith(name) and 5 * len(name) >= 3 * len(one)]
    found = begun or [one for one in known if _is_slip(name, one)]
    return found[0] if len(found) == 1 else None


def _is_slip(name: str, meant: str) -> bool:
    """Return whether one letter is missing, too much or wrong, or swapped with the next."""
    for i in range(len(name) + 1):
        tail, rest = name[i:], meant[i:]
        mended = (tail[1:], rest), (tail, rest[1:]), (tail[1:], rest[1:])
        if any(a == b for a, b in mended) or tail[1::-1] + tail[2:] == rest:
            return True
        if name[i : i + 1] != rest[:1]:
            return False
    return False


def names_arguments(*others: type) -> Callable[[E], E]:
    """Decorate a function, or a class's constructor and public methods, to answer an unknown
    argument with the right one, in a TypeError. A class is also treated as by `names_attributes`.

    others: dataclasses whose fields a function takes, too, as `**overrides`.
    """

    def named(entry: E) -> E:
        if not isinstance(entry, type):
            return _checked(entry, entry.__name__ + _ENTRY, others)
        for name, method in list(vars(entry).items()):
            if isinstance(method, FunctionType) and (name == "__init__" or name[0] != "_"):
                is_init = name == "__init__"
                place = entry.__name__ if is_init else f"{entry.__name__}.{name}"
                end = "" if is_init and is_dataclass(entry) else _ENTRY
                setattr(entry, name, _checked(method, place + end, others))
        return names_attributes(entry) if attributes_of(entry.__name__) else entry

    return named


def _checked(call: Callable[..., Any], place: str, others: Iterable[type]) -> Any:
    """Wrap a function so that it checks the names of its arguments."""
    parameters = inspect.signature(call).parameters.values()
    takes_all = not others and any(one.kind == one.VAR_KEYWORD for one in parameters)
    known = [one.name for one in parameters if one.kind != one.VAR_KEYWORD and one.name != "self"]
    listed, all_known = ", ".join(known), {*known}
    for other in others:
        listed += f", and the fields of {other.__name__} (docs/reference/config.md)"
        all_known |= {field.name for field in fields(other)}
    kind = "argument" if place.endswith(_ENTRY) else "field"

    def check(given: dict[str, Any]) -> None:
        for name in given.keys() - all_known:
            remedy = advice(place, name, all_known) or f"its {kind}s are {listed}"
            raise TypeError(f"{place} has no {kind} {name!r}: {remedy}")

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def coroutine(*values: Any, **given: Any) -> Any:
            check(given)
            return await call(*values, **given)

        return coroutine

    @functools.wraps(call)
    def function(*values: Any, **given: Any) -> Any:
        check(given)
        return call(*values, **given)

    return call if takes_all or not known else function


class _Missing:
    """An attribute that neither a class nor its objects have."""

    def __init__(self, name: str, advised: str):
        self._name, self._advised = name, advised

    def __get__(self, of: object, owner: type) -> Any:
        what = f"type object {owner.__name__!r} has no attribute {self._name!r}"
        raise AttributeError(f"{what}: {self._advised}")


def names_attributes(owner: T) -> T:
    """Decorate a class to answer an attribute that other libraries have with what is to be used, in
    an AttributeError."""
    advised, before = attributes_of(owner.__name__), getattr(owner, "__getattr__", None)

    def missing(self: Any, name: str) -> Any:
        if before is not None and name not in advised:
            return before(self, name)
        remedy = f": {advised[name]}" if name in advised else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{remedy}")

    owner.__getattr__ = missing  # type: ignore[attr-defined]
    for name in advised:
        if name.startswith(("__", "from_")):  # Python, and users, look these up in the class
            setattr(owner, name, _Missing(name, advised[name]))
    return owner


@functools.cache
def attributes_of(owner: str) -> dict[str, str]:
    """Return the names that other libraries have in place of an owner's attributes, each with what
    to use."""
    found = [row for row in rows() if f"{owner}." in row.places]
    return {name: row.text for row in found for names in row.libraries.values() for name in names}
