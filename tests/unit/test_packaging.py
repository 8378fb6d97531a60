"""The pins of constraints/: what setup.py asks for, and what that asks for in turn; the Makefile's
choice of environments."""

import os
import re
import shutil
import subprocess
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


def run_make(*arguments: str, folder: Path = ROOT, **environment: str):
    """make, without the variables of a make that runs these tests."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **environment}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


DOOR = ("DOOR_TESTS=tests/unit/text",)
WHOLE, KERNELS = (".venv", "tests"), (".venv-kernels", "tests/kernels")
NEWEST = read_pins(FILES[-1])["megatron-core"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("VERSION=3.11", *DOOR), [WHOLE, (f".venv-core-{NEWEST}", "tests/unit/text"), KERNELS]),
        (("VERSION=3.11", "DOOR_TESTS="), [WHOLE, KERNELS]),
        (("VERSION=3.13", *DOOR), [WHOLE, KERNELS]),
        (("VERSION=3.11", *DOOR, "CORE=0.17.0"), [(".venv-core-0.17.0", "tests")]),
        (("VERSION=3.11", *DOOR, "PINS="), [WHOLE]),
        (("VERSION=3.11", *DOOR, "VENV=other"), [("other", "tests")]),
    ],
)
def test_make_test_runs_the_door_on_the_newest_pinned_core_too(arguments, expected):
    """3.11 is pinned to an older megatron-core. An environment that is chosen is the only one;
    else kernels have one of their own."""
    assert read_pins(FILES[0])["megatron-core"] < NEWEST
    commands = run_make("-n", "test", *arguments).stdout.splitlines()
    runs = [line.split() for line in commands if "/bin/python -m pytest " in line]
    assert [(run[0].removesuffix("/bin/python"), run[-1]) for run in runs] == expected


def test_make_test_gpu_tells_what_it_needs_before_it_installs(tmp_path):
    for name in ("Makefile", "constraints", "tests/helpers/gpu_machine.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    before = sorted(tmp_path.iterdir())
    result = run_make("test-gpu", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stdout) == (2, "")
    need, container, end = result.stderr.splitlines()
    assert need.startswith("make test-gpu needs an NVIDIA GPU, and torch in the Python that starts")
    assert "here: no NVIDIA GPU" in need
    image = re.search(r"nvcr.io/nvidia/pytorch:\d\d\.\d\d-py3", container)[0]
    assert f"image: {image}\n" in (ROOT / ".github/workflows/gpu.yml").read_text()
    assert end.startswith("make: *** ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_two_ranks_run_where_there_are_two_gpus(gpus):
    commands = run_make("-n", "gpu-tests", f"GPUS={gpus}").stdout
    assert "-m pytest -m gpu tests" in commands
    assert ("-m pytest -x tests/functional/test_two_gpus.py" in commands) == (gpus == "8")
    assert ("-m torch.distributed.run --nproc-per-node 2 " in commands) == (gpus == "8")
    assert ("One GPU: " in commands) == (gpus == "1")
