"""Scripts of Megatron run on our engine: unchanged, or with their imports changed."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command, run_script
from reference import greedy_tokens, random_tokens, tiny_model

from megatron_hybrid import compat
from megatron_hybrid.megatron.__main__ import main

ROOT = Path(__file__).parents[3]
COORDINATED = Path(__file__).with_name("coordinated.py")
EXAMPLE = ROOT / "examples" / "megatron_inference.py"


def printed_by(
    script: Path, main: Callable[[list[str]], None], folder: Path, *arguments: str
) -> str:
    command = Command([str(script), *arguments], folder, main=main)
    assert command.wait() == [0], command.printed()
    return command.out()


def test_every_module_that_scripts_import_resolves(tmp_path):
    """As a statement, from its package and by its finder, in any release of megatron-core."""
    script = """
from importlib import import_module
from importlib.util import find_spec
import megatron_hybrid.megatron as door
from megatron_hybrid.megatron.stand_in import MODULES, install
install()
for path in MODULES:
    package, _, name = path.rpartition(".")
    assert getattr(import_module(package), name) is import_module(path), path
    assert find_spec(path) is not None, path
    for name in door.__all__:
        assert getattr(import_module(path), name) is getattr(door, name), (path, name)
from megatron.core.inference.apis.llm import MegatronLLM
from megatron.core.inference.contexts.dynamic_context import MaxSequenceLengthOverflowError
import megatron.core.inference.apis.async_llm as module
assert MegatronLLM is door.MegatronLLM and module.MegatronAsyncLLM is door.MegatronAsyncLLM
print(len(MODULES))
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    assert int(printed_by(path, run_script, tmp_path / "printed")) > 10


def test_the_example_runs_unchanged_and_with_changed_imports(tmp_path):
    text = EXAMPLE.read_text(encoding="utf-8")
    ours, count = re.subn(
        r"^from megatron\.core\.inference[\w.]* import",
        "from megatron_hybrid.megatron import",
        text,
        flags=re.MULTILINE,
    )
    assert 4 <= count <= 6
    changed = tmp_path / "changed.py"
    changed.write_text(ours, encoding="utf-8")
    unchanged_output = printed_by(EXAMPLE, main, tmp_path / "unchanged")
    assert printed_by(changed, run_script, tmp_path / "printed") == unchanged_output
    assert "cached" in unchanged_output


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m megatron_hybrid.megatron SCRIPT")
    assert ended.value.code == (0 if arguments == ["--help"] else 2)
    assert max(map(len, printed.splitlines())) <= 90


def test_a_module_runs_like_a_script(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text(
        "import sys\n"
        "from megatron.core.inference.engines import DynamicInferenceEngine as Engine\n"
        "print(__name__, sys.argv[1:], Engine.__module__)\n"
        "sys.exit(3)\n"
    )
    command = Command([str(tmp_path), "package.job"], tmp_path / "printed", main=run_module)
    assert command.wait() == [3]
    assert command.out() == "__main__ ['--load', 'x'] megatron_hybrid.megatron.engine\n"


def run_module(arguments: list[str]) -> None:
    """As from the folder that it is in."""
    folder, module = arguments
    sys.path.insert(0, folder)
    main(["-m", module, "--load", "x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py is no file"),
        (["-m", "nowhere.job"], "no module that runs: No module named 'nowhere'"),
        (["-m", "megatron_hybrid.ops"], "no code of 'megatron_hybrid.ops.__main__'"),
        (["-m", "sys"], "no code of 'sys'"),
    ],
)
def test_what_cannot_run_is_named(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)


if compat.HAVE_COORDINATOR:  # 0.16 has another one

    @pytest.mark.matrix
    @pytest.mark.parametrize("num_engines", [1, 2])
    def test_a_script_with_the_coordinator_runs_unchanged(num_engines, tmp_path):
        """Core's coordinator in its own process, core's client, and an engine of ours a rank."""
        arguments = [str(COORDINATED), str(tmp_path / "schedule.json")]
        command = Command(arguments, tmp_path / "printed", num_engines, main)
        assert command.wait() == [0] * num_engines, command.printed()
        first, *others = (json.loads(command.out(rank)) for rank in range(num_engines))
        model, prompts = tiny_model("M*-"), [random_tokens(40, s, 95) for s in range(6)]
        expected = [greedy_tokens(model, prompt, 6) for prompt in prompts]
        assert first["high level"]["answers"] == expected
        assert first["high level"]["again"] == expected[:1]
        assert all(not other["high level"]["is_primary"] for other in others)
        found = first["coordinator"]
        assert found["address"].startswith("tcp://127.0.0.1:")
        *asked, hello = found["first"]
        assert [row["tokens"] for row in asked] == expected and hello["prompt_length"] == 11
        for row in (*asked, hello):
            assert row["text"] == "".join(chr(t + 32) for t in row["tokens"] if t < 95)
            assert len(row["log_probs"]) == 6 and row["policy_epoch"] == [[0, 0]]
        # Each prompt comes to the engine that knows it.
        assert [row["tokens"] for row in found["again"]] == expected
        assert [row["cached"] for row in found["again"]] == [40] * 6
        records = json.loads((tmp_path / "schedule.json").read_text())["records"]
        assert {record["rank_index"] for record in records} == set(range(num_engines))
        assert found["failed"] == ["FAILED", "MaxSequenceLengthOverflowError"]
        assert found["empty"][0] == "FAILED" and "the prompt is empty" in found["empty"][1]
        changed = found["new weights"]
        assert changed["policy_epoch"] == [[0, 7]] and changed["cached"] == 0
        assert changed["tokens"] != expected[0]
        assert all(other["coordinator"]["steps"] for other in others)
