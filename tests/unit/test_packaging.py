"""The pins of constraints/: what setup.py asks for, and what that asks for in turn."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "constraints").glob("python*.txt"))
LINE = re.compile(r"([a-z0-9-]+)==([^\s;]+)")


def version_of(file: Path) -> str:
    return file.stem.removeprefix("python")


def read_pins(file: Path) -> dict[str, Version]:
    """Name -> version. Each line but comments is one exact pin."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches) if not match]
    pins = {match[1]: Version(match[2]) for match in matches}
    assert len(pins) == len(lines)
    return pins


def active(requirements: list[str], python: str, extras: tuple[str, ...] = ("",)):
    """The requirements that hold on Linux with one of the extras."""
    system = {"platform_system": "Linux", "sys_platform": "linux", "os_name": "posix"}
    values = {**system, "python_version": python, "python_full_version": f"{python}.0"}
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**values, "extra": extra}) for extra in extras):
            yield requirement


def assert_pinned(requirement: Requirement, pins: dict[str, Version]):
    name = canonicalize_name(requirement.name)
    assert name in pins, f"{name} is not pinned: make lock"
    assert requirement.specifier.contains(pins[name], prereleases=True), (str(requirement), pins)


def test_files_are_those_of_the_makefile():
    versions = re.search(r"^PINNED *:= *(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert versions.split() == [version_of(file) for file in FILES]
    assert versions.split()[0] == "3.11"


@pytest.mark.parametrize("file", FILES, ids=version_of)
def test_each_requirement_of_ours_is_pinned_within_its_range(file):
    pins = read_pins(file)
    extras = ("", "test", "bench", "dev")
    ours = list(active(requires("megatron_hybrid"), version_of(file), extras))
    assert {"torch", "megatron-core", "transformers", "ruff"} <= {item.name for item in ours}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    torch = re.search(r"torch==[\d.]+", (ROOT / "Makefile").read_text())[0]
    for requirement in [*ours, *map(Requirement, [*build, torch, "pip"])]:
        assert_pinned(requirement, pins)


def test_what_the_pinned_packages_ask_for_is_pinned_too():
    """Asked of the packages as installed, so for this Python alone."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    file = ROOT / "constraints" / f"python{python}.txt"
    pins = read_pins(file if file in FILES else FILES[-1])
    compared = 0
    for name, version in pins.items():
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # of another extra, or of torch's CUDA build
        if Version(installed.version).public == version.public:
            compared += 1
            for requirement in active(installed.requires or [], python):
                assert_pinned(requirement, pins)
    assert compared, "no package is installed in the version that is pinned"
