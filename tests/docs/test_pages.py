"""Every block of code in the docs and the README runs on the demo model, or is sound as far as that
shows."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from doc_blocks import blocks
from doc_checks import errors_of, type_errors_of

ROOT = Path(__file__).parents[2]
OTHERS = ("README.md", "CONTRIBUTING.md", "examples/README.md")
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *(ROOT / name for name in OTHERS)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MOST_SECONDS = 60
"""Of a block: ten on a quiet machine."""


def environment() -> dict[str, str]:
    """As for a reader who has the environment active, on a CPU."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {"PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | given


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory):
    """`megatron-hybrid serve` at the port that the pages name."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 8000))  # raises where another program has the port
    folder = tmp_path_factory.mktemp("server")
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "megatron_hybrid", "serve"],
            **{"cwd": folder, "env": environment(), "stdout": log, "stderr": log},
        )
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen("http://127.0.0.1:8000/health").close()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_are_sound(page):
    assert errors_of(blocks(page)) == []


def test_blocks_have_no_type_errors(tmp_path):
    pages = {name: blocks(page) for name, page in zip(NAMES, PAGES)}
    assert type_errors_of(pages, tmp_path) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_blocks_run(page, request, tmp_path):
    run = [block for block in blocks(page) if block.runs]
    if any(":8000" in block.code for block in run):
        request.getfixturevalue("demo_server")
    if run:
        script = Path(__file__).parent / "run_page.py"
        result = subprocess.run(
            [sys.executable, script, page],
            **{"cwd": tmp_path, "env": environment(), "text": True, "timeout": 540},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert result.returncode == 0, result.stdout[-6000:]
        seconds = [float(each) for each in re.findall(r"^== ([\d.]+) s$", result.stdout, re.M)]
        assert len(seconds) == len(run) and max(seconds) <= MOST_SECONDS


def test_checks_find_what_is_wrong(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nmegatron-hybrid serve FOLDER --port PORT --no-option  # it's\n"
        "python -m benchmarks.nothing && python -m benchmarks.replay --no-flag > file 2>&1\n"
        "make nothing | cat examples/nothing.py\nbin/megatron-hybrid train laptop run.step=3\n"
        "megatron-hybrid serve \\\n    FOLDER --max-waiting N\n```\n"
        "<!-- not run: a reason -->\n```json\n{'a': 1}\n```\n"
    )
    found = "\n".join(errors_of(blocks(page)))
    for text in (
        *("--no-option", "benchmarks.nothing", "--no-flag", "target nothing"),
        *("examples/nothing.py is not", "run has no field 'step'", "line 11"),
    ):
        assert text in found
    assert len(found.splitlines()) == 7
    page.write_text("```python\nx = 1\n```\n```bash\necho $((1 + 1)) > file\n```\n```sh\n```\n")
    with pytest.raises(ValueError, match=r"page.md:7: a block of 'sh'"):
        blocks(page)


def test_pyright_finds_what_is_wrong(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport megatron_hybrid as mh\nmodel, tokenizer = mh.load_pretrained('demo')\n"
        "engine = mh.DynamicInferenceEngine(model, tokenizer, mh.InferenceConfig(no_field=1))\n"
        "engine.generates(['a'])\nengine.generate(['a'], no_argument=1)\ntokenizer.no_method()\n"
        "from megatron_hybrid.inference import nothing\n```\n"
    )
    found = type_errors_of({"page.md": blocks(page)}, tmp_path)
    for text in ("no_field", "generates", "no_argument", "no_method", "nothing"):
        assert any(text in each for each in found)
    assert len(found) == 6 and found[0].startswith("page.py:4: ")
