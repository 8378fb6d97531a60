"""The pins of constraints/: what setup.py asks for, and what that asks for in turn; the Makefile's
choice of environments."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints"
FILES = sorted(CONSTRAINTS.glob("python*.txt"))
ALL_FILES = sorted(CONSTRAINTS.glob("*.txt"))
LINE = re.compile(r"([a-z0-9-]+)==([^\s;]+)")


def version_of(file: Path) -> str:
    """Of Python; a file for another torch is resolved for the oldest, and all can install it."""
    return (file if file in FILES else FILES[0]).stem.removeprefix("python")


def stem(file: Path) -> str:
    return file.stem


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


@pytest.mark.parametrize("file", ALL_FILES, ids=stem)
def test_each_requirement_of_ours_is_pinned_within_its_range(file):
    pins = read_pins(file)
    extras = ("", "test", "kernels", "bench", "dev")
    ours = list(active(requires("megatron_hybrid"), version_of(file), extras))
    wanted = {"torch", "megatron-core", "transformers", "triton", "fla-core", "ruff"}
    assert wanted <= {item.name for item in ours}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in [*ours, *map(Requirement, [*build, "pip"])]:
        assert_pinned(requirement, pins)


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_what_dynamo_needs_beside_itself_is_pinned(file):
    lines = (ROOT / "tests" / "dynamo" / "requirements.txt").read_text().splitlines()
    beside = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {name: Version(version) for name, version in beside.items()} | read_pins(file)
    wanted = list(active(requires("megatron_hybrid"), version_of(file), ("dynamo",)))
    assert {"aiohttp", "msgspec", "pyzmq", "fastapi"} <= {item.name for item in wanted}
    for requirement in wanted:
        assert_pinned(requirement, pins)
    # The worker's error and the page name the same release.
    named = "pip install --no-deps ai-dynamo=={0} ai-dynamo-runtime=={0}".format(
        beside["ai-dynamo"]
    )
    assert named in (ROOT / "megatron_hybrid" / "dynamo" / "__main__.py").read_text()
    assert named in (ROOT / "docs" / "guides" / "many_machines.md").read_text()


def recorded(torch: Version) -> list[str]:
    """What PyPI's build of that release asks for, as `make lock` wrote it down."""
    return (CONSTRAINTS / f"torch-{torch}.requires").read_text().splitlines()


@pytest.mark.parametrize("file", ALL_FILES, ids=stem)
def test_what_pypi_s_torch_asks_for_is_pinned_whichever_build_is_installed(file):
    """A build for CPUs asks for neither Triton nor CUDA, and would hide a wrong pin."""
    pins = read_pins(file)
    assert "torch" in pins
    wanted = list(active(recorded(pins["torch"]), version_of(file)))
    assert {"triton", "nvidia-nccl-cu13"} <= {requirement.name for requirement in wanted}
    for requirement in wanted:
        assert_pinned(requirement, pins)


def test_the_record_of_torch_is_what_the_installed_build_asks_for():
    """PyPI's build asks for all of it, one of another index for a part."""
    installed = distribution("torch")
    version = Version(installed.version)
    pinned = {read_pins(file)["torch"] for file in ALL_FILES}
    assert {path.name for path in CONSTRAINTS.glob("*.requires")} == {
        f"torch-{torch}.requires" for torch in pinned
    }
    if Version(version.public) in pinned:  # else it was asked for by TORCH=
        record, asked = set(recorded(Version(version.public))), set(installed.requires)
        assert asked <= record if version.local else asked == record


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


def test_an_editable_install_is_a_path_that_type_checkers_follow():
    packages = Path(sysconfig.get_path("purelib"))
    assert not list(packages.glob("__editable__*megatron_hybrid*finder.py"))


def test_the_page_is_small_and_in_the_wheel_with_the_licences_of_others():
    package = ROOT / "megatron_hybrid"
    globs = re.findall(r'"(serving/page/[^"]*)"', (ROOT / "setup.py").read_text())
    packed = {path for glob in globs for path in package.glob(glob) if path.is_file()}
    assert packed == {path for path in package.glob("serving/page/**/*") if path.is_file()}
    assert sum(path.stat().st_size for path in packed) < 180_000
    vendor = package / "serving/page/vendor"
    rows = re.findall(r"^\| `(.+?)` .*, `(.+?)` \|$", (vendor / "README.md").read_text(), re.M)
    assert {name for row in rows for name in row} == {
        path.name for path in vendor.iterdir() if path.name != "README.md"
    }


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
    runs = [line.split() for line in commands if re.match(r"\S+/bin/python -m pytest ", line)]
    assert [(run[0].removesuffix("/bin/python"), run[-1]) for run in runs] == expected


def test_kernels_have_a_run_on_the_torch_of_gpu_machines():
    pins = read_pins(CONSTRAINTS / "torch2.11.txt")
    assert (pins["torch"].release[:2], pins["triton"].release[:2]) == ((2, 11), (3, 6))
    assert pins["numpy"] < Version("2.4"), "Triton 3.6's interpreter cannot read its arrays"
    commands = run_make("-n", "kernel-tests-torch-2.11").stdout
    assert "constraints/torch2.11.txt > .venv-torch-2.11/constraints.txt" in commands
    assert ".venv-torch-2.11/bin/python -m pytest" in commands


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
    told = re.findall(r'^echo "One GPU: .*"$', commands, re.MULTILINE)
    assert len(told) == (gpus == "1")
