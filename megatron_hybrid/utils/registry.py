"""Registry: classes of one kind by name, those of this package and those of others."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Things of one kind by name. Each is given itself or as a reference, "module:attribute", which
    is imported when its name is first asked for.

    Other packages add things by `register`, or by entry points of `group`, which all processes and
    commands find once the package is installed.

    Args:
        kind: what the things are, for errors.
        group: of the entry points; their names are those of the things.
        check: called with name and thing before anybody gets it; raises TypeError or ValueError if
            it is not as its users expect.
        own: things of this package.
    """

    def __init__(
        self, kind: str, group: str, check: Callable[[str, T], None], own: Mapping[str, T | str]
    ):
        self.kind, self.group = kind, group
        self._check = check
        self._things = dict(own)
        self._checked: dict[str, T] = {}

    def register(self, name: str, thing: T | str) -> None:
        """Register a thing, or a reference to it, for this process. All ranks must do the same.

        Raises:
            ValueError: the name is taken by another thing.
            TypeError, ValueError: the thing is not as its users expect; a reference is checked when
                it is first asked for.
        """
        known = self._given()
        if name in known and known[name] != thing:
            raise ValueError(
                f"the {self.kind} {name!r} is taken by {known[name]}; use another name"
            )
        if not isinstance(thing, str):
            self._check(name, thing)
        self._things[name] = thing

    def require(self, name: str, field: str, others: Collection[str] = ()) -> None:
        """Raise ValueError unless a field's value is a name here, or one of `others`."""
        if name not in others and name not in self:
            raise ValueError(
                f"{field} is {name!r}; use one of {', '.join(map(repr, (*others, *self)))}. A "
                f"{self.kind} of another package has to be registered, by a call or by an entry "
                f"point of the group {self.group!r}."
            )

    def __getitem__(self, name: str) -> T:
        if name not in self._checked:
            thing = given = self._things.get(name) or self._given()[name]
            if isinstance(given, str):
                try:
                    thing = resolve_name(given)
                except (ImportError, AttributeError, ValueError) as error:
                    what = f"the {self.kind} {name!r} is {given}, which cannot be imported"
                    raise ImportError(f"{what}: {error}") from error
            self._check(name, thing)
            self._checked[name] = thing
        return self._checked[name]

    def __contains__(self, name: object) -> bool:
        return name in self._things or name in self._checked or name in self._given()

    def __iter__(self) -> Iterator[str]:
        return iter(self._given())

    def __len__(self) -> int:
        return len(self._given())

    def _given(self) -> dict[str, T | str]:
        """Return all things and references. Raise ValueError if two packages use one name."""
        found = dict(self._things)
        for point in entry_points(group=self.group):
            if found.setdefault(point.name, point.value) != point.value:
                package = point.dist.name if point.dist else "a package"
                raise ValueError(
                    f"{package} has an entry point {point.name!r} of {self.group!r}, a name that "
                    f"is taken by {found[point.name]}: rename one of them, or uninstall {package}"
                )
        return found


def check_class(what: str, given: object, like: type, *arguments: str) -> None:
    """Check that a class can replace another one.

    Args:
        what: name of the class, for errors.
        given: the class.
        like: the other one, whose own public methods it must have, with the same arguments.
        arguments: arguments that it is made with, in this order.

    Raises:
        TypeError: it cannot; the message names the method and its arguments.
    """
    if not inspect.isclass(given):
        raise TypeError(f"{what} is {given!r}; it must be a class like {like.__name__}")
    check_call(what, given, *arguments)
    for name, method in vars(like).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        own = getattr(given, name, None)
        if not callable(own) or getattr(own, "__isabstractmethod__", False):
            raise TypeError(f"{what} has no method {name}{inspect.signature(method)}")
        check_call(what, own, *inspect.signature(method).parameters)


def check_call(what: str, function: Callable, *arguments: str) -> None:
    """Raise TypeError unless a function, or a class, takes these arguments by position."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{what}: {function.__qualname__}{signature} is called with "
            f"({', '.join(arguments)}): {error}"
        ) from None
