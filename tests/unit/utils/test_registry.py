"""Registries: what is found under a name, and what is refused before anybody uses it."""

from abc import abstractmethod
from typing import Protocol

import pytest

from megatron_hybrid.utils.registry import Registry, check_class


class Shape(Protocol):
    """What the things of these tests are like."""

    @abstractmethod
    def area(self, scale: float) -> float: ...

    def name(self) -> str:
        return "shape"


class Square(Shape):
    def __init__(self, side):
        self.side = side

    def area(self, scale):
        return scale * self.side**2


class Disc:
    """Derives from nothing."""

    def __init__(self, radius, width=1.0):
        self.radius = radius

    def area(self, scale, *, pi=3.14):
        return scale * pi * self.radius**2

    def name(self):
        return "disc"


@pytest.fixture
def shapes():
    def check(name, thing):
        check_class(f"the shape {name!r}", thing, Shape, "side")

    own = {"square": f"{__name__}:Square", "gone": f"{__name__}:Gone"}
    return Registry("shape", "tests.shapes", check, own)


def add_package(folder, name, *points):
    """Write the metadata of an installed package, with entry points."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(["[tests.shapes]", *points]))


def test_things_of_this_package_of_a_call_and_of_an_installed_one(shapes, tmp_path, monkeypatch):
    shapes.register("disc", Disc)
    shapes.register("disc", Disc)  # as a cell that is run again
    assert list(shapes) == ["square", "gone", "disc"] and "other" not in shapes
    add_package(tmp_path, "others", f"other = {__name__}:Disc", f"square = {__name__}:Square")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(shapes) == ["square", "gone", "disc", "other"] and len(shapes) == 4
    assert shapes["square"] is Square and shapes["disc"] is shapes["other"] is Disc
    with pytest.raises(KeyError):
        shapes["none"]
    shapes.register("no module", "nothing.at.all:Shape")
    shapes.register("no reference", "a shape")
    for name in ("gone", "no module", "no reference"):
        with pytest.raises(ImportError, match=f"the shape '{name}' is .*, which cannot be impor"):
            shapes[name]


def test_a_name_is_of_one_thing(shapes, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"the shape 'square' is taken by .*:Square; use another"):
        shapes.register("square", Disc)
    add_package(tmp_path, "others", f"square = {__name__}:Disc")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"others has an entry point 'square'.*is taken by"):
        list(shapes)


def test_an_unknown_name_is_refused_with_all_known_ones_and_the_remedy(shapes):
    shapes.require("square", "form")
    shapes.require("none", "form", others=("none",))
    message = r"form is 'oval'; use one of 'none', 'square', 'gone'.*entry point.*'tests.shapes'"
    with pytest.raises(ValueError, match=message):
        shapes.require("oval", "form", others=("none",))


class NoArea(Shape):
    def __init__(self, side): ...


class OtherArea(Square):
    def area(self): ...


class MoreAsked(Square):
    def area(self, scale, pi): ...


class OtherMaking(Square):
    def __init__(self): ...


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (3, "the shape 'new' is 3; it must be a class like Shape"),
        (NoArea, r"the shape 'new' has no method area\(self, scale"),
        (OtherArea, r"OtherArea.area\(self\) is called with \(self, scale\): too many"),
        (MoreAsked, r"MoreAsked.area\(self, scale, pi\) is called with.*missing.*'pi'"),
        (OtherMaking, r"OtherMaking\(\) is called with \(side\): too many"),
    ],
)
def test_a_class_that_cannot_stand_there_is_refused_at_once(shapes, thing, message):
    with pytest.raises(TypeError, match=message):
        shapes.register("new", thing)
    assert "new" not in shapes
