"""Scripts of Megatron run on our engine: unchanged, or with their imports changed."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import Command, run_script
from reference import full_logits, greedy_tokens, random_tokens, tiny_model

from megatron_hybrid import compat
from megatron_hybrid.megatron.__main__ import main

ROOT = Path(__file__).parents[3]
EVERY_CALL = Path(__file__).with_name("every_call.py")
COORDINATED = Path(__file__).with_name("coordinated.py")
EXAMPLE = ROOT / "examples" / "megatron_inference.py"
PROMPT = random_tokens(48, vocab_size=95)


def printed_by(
    script: Path, main: Callable[[list[str]], None], folder: Path, *arguments: str
) -> str:
    command = Command([str(script), *arguments], folder, main=main)
    assert command.wait() == [0], command.printed()
    return command.out()


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """What every_call.py read."""
    folder = tmp_path_factory.mktemp("seen") / "printed"
    return json.loads(printed_by(EVERY_CALL, main, folder, "--flag", "3"))


def test_the_script_is_main_and_has_its_arguments(seen):
    assert (seen["argv"], seen["name"]) == (["--flag", "3"], "__main__")


@pytest.mark.parametrize(
    ("request_id", "prompt"), [("20", PROMPT), ("10", PROMPT[:30]), ("30", PROMPT[5:])]
)
def test_every_field_of_a_request(seen, request_id, prompt):
    request, model = seen[request_id], tiny_model("M*-M*-")
    tokens = request["generated_tokens"]
    assert tokens == greedy_tokens(model, prompt, 60 - len(prompt))
    assert request["prompt_tokens"] == prompt and request["prompt_length"] == len(prompt)
    assert request["prompt"] == "".join(chr(token + 32) for token in prompt)
    assert request["generated_text"] == "".join(chr(t + 32) for t in tokens if t < 95)
    # Greedy, and processed: a token that is the most likely one has all of the probability.
    assert request["generated_log_probs"] == [0.0] * len(tokens)
    best = full_logits(model, prompt).argmax(-1)[:-1]
    expected = [0.0 if hit else -torch.inf for hit in best == torch.tensor(prompt[1:])]
    assert request["prompt_log_probs"] == expected
    assert request["prompt_top_n_logprobs"] == len(prompt) - 1
    assert len(request["generated_top_n_logprobs"]) == len(tokens)
    events = ["ADD_ENGINE", "ADD_CONTEXT", *["GENERATED_TOKEN"] * len(tokens), "FINISH"]
    assert request["events"] == events
    assert request["event"] == ["payload", "timestamp", "type"]
    assert request["times"] and request["status"] == "COMPLETED" and request["top_k"] == 1
    assert request["routing_indices"] is None
    assert len({seen[other]["uid"] for other in ("10", "20", "30")}) == 3
    assert request["num_cached_tokens"] == 0  # all asked for log-probs of their prompts


def test_every_module_that_scripts_import_resolves(tmp_path):
    """As a statement, from its package and by its finder, in any release of megatron-core."""
    script = """
from importlib import import_module
from importlib.util import find_spec
import megatron_hybrid.megatron as door
from megatron_hybrid.megatron.stand_in import NAMES, install
install()
for path, names in NAMES.items():
    package, _, name = path.rpartition(".")
    assert getattr(import_module(package), name) is import_module(path), path
    assert find_spec(path) is not None, path
    for name in names:
        assert getattr(import_module(path), name) is getattr(door, name), (path, name)
from megatron.core.inference.apis.llm import MegatronLLM
from megatron.core.inference.contexts.dynamic_context import MaxSequenceLengthOverflowError
import megatron.core.inference.apis.async_llm as module
assert MegatronLLM is door.MegatronLLM and module.MegatronAsyncLLM is door.MegatronAsyncLLM
print(len(NAMES))
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    assert int(printed_by(path, run_script, tmp_path / "printed")) > 10


def test_every_counter_of_the_context(seen):
    context = seen["context"]
    assert context.pop("step_count") > 12
    assert context == {
        "lifetime_prefill_token_count": 48 + 30 + 43,
        "async": 0,
        "max_tokens": 64,
        "max_requests": 8,
        "max_sequence_length": 256,
        "unified_memory_level": 0,
        "graphs": 0,
        "blocks": True,
        "block_size_tokens": 16,
        "enable_prefix_caching": True,
    }


def test_every_other_entry(seen):
    expected = [greedy_tokens(tiny_model("M*-M*-"), p, 4) for p in (PROMPT, PROMPT[:20])]
    assert seen["suspended"] is True
    assert seen["generate"] == expected
    assert seen["cached"] == len(PROMPT)
    assert seen["legacy"] == [1, 0]
    assert seen["failed"] == ["FAILED", "FAIL"]
    first, second, *static = seen["refused"]
    for text in (first, second):
        assert "await start_listening_to_data_parallel_coordinator() first" in text
    for name, text in zip(("Context", "Engine"), static, strict=True):
        assert text.startswith(f"StaticInference{name} is not supported")
        assert "DynamicInferenceEngine(controller, context).generate(" in text
    assert seen["llm"] == expected[:1] and seen["async_llm"] == expected[0]


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


def test_a_missing_script_is_named():
    with pytest.raises(SystemExit, match=r"nowhere.py is no file"):
        main(["nowhere.py"])


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
