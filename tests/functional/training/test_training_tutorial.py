"""The commands of docs/guides/training_tutorial.md run, cut down, and what they train learns."""

import ast
import io
import re
import runpy
import subprocess
from contextlib import chdir, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
from commands import run_torchrun
from megatron.core import parallel_state

from megatron_hybrid import load_pretrained
from megatron_hybrid.cli import main
from megatron_hybrid.training.reports import LOG, read_log

PAGE = (Path(__file__).parents[3] / "docs/guides/training_tutorial.md").read_text(encoding="utf-8")
SMALLER = {
    "laptop": [
        "model.hidden_size=64",
        "model.ffn_hidden_size=96",
        "data.sequence_length=64",
        "run.steps=20",
        "run.eval_every_steps=10",
        "run.eval_batches=1",
        "optimizer.warmup_steps=5",
    ],
    "chats.yaml": ["run.steps=30", "data.sequence_length=64"],
}
"""Recipe -> overrides; those of the page come behind them, so they count."""
KEPT = 15
"""One of so many files of the text is kept."""

pytestmark = [
    pytest.mark.matrix,  # test_train_command.py and test_on_two_ranks.py are of the same kind
    # Core reads the gradients of views.
    pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning"),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    return "".join(blocks("bash")).replace("\\\n", " ").splitlines()


def words(command: str) -> list[str]:
    """The arguments that a shell makes of a command."""
    script = f"printf '%s\\0' {command}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.split("\0")[:-1]


def run(command: str) -> tuple[str, str]:
    """Run a command of the page in the working folder. Returns its output and its messages."""
    program, *arguments = words(command)
    if "train" in arguments:
        behind = arguments.index("train") + 2
        arguments[behind:behind] = SMALLER[arguments[behind - 1]]
    if "preprocess" in arguments:
        arguments += ["--workers", "1"]  # each imports much
    if program == "torchrun":
        result = run_torchrun(arguments)
        return result.stdout, result.stderr
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as messages:
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            assert program == "megatron-hybrid", command
            parallel_state.destroy_model_parallel()
            expected = 3 if "run.stop_at_step" in command else 0
            assert main(arguments) == expected, command
    return output.getvalue(), messages.getvalue()


def leave_out_most_text() -> None:
    files = sorted(Path("text").glob("*/*.txt"))
    assert len(files) > 10 * KEPT
    for index, path in enumerate(files):
        if index % KEPT:
            path.unlink()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Command -> its output and its messages, of all commands in their order."""
    result = {}
    with chdir(tmp_path_factory.mktemp("tutorial")):
        for text in [*blocks("python"), *blocks("yaml")]:
            Path(re.match(r"# (\S+)\n", text)[1]).write_text(text)
        for command in commands():
            result[command] = run(command)
            if command == "python text.py":
                leave_out_most_text()
        yield result


@pytest.fixture(scope="module")
def printed(results):
    """Command -> its output."""
    return {command: output for command, (output, _) in results.items()}


def outputs(printed: dict[str, str], part: str) -> list[str]:
    """Of the commands that have this part."""
    found = [output for command, output in printed.items() if part in command]
    assert found
    return found


def test_losses_fall(printed):
    records = read_log(Path("runs/laptop") / LOG)
    losses = [record["loss"] for record in records if "loss" in record]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert len(losses) == len(held_out) == 2
    assert losses[1] < losses[0] - 0.5 and held_out[1] < held_out[0] - 0.1
    assert Path("runs/laptop/losses.png").exists()


def test_tokens_of_the_dataset_spell_a_document(printed):
    (output,) = outputs(printed, "look.py")
    text = "".join(ast.literal_eval(output))
    documents = [path.read_text(encoding="utf-8") for path in Path("text/held_out").iterdir()]
    assert text and any(document.startswith(text) for document in documents)


def test_each_prompt_is_continued(printed):
    generated = {command: printed[command] for command in printed if " generate " in command}
    assert len(set(generated.values())) == len(generated) == 4
    for command, output in generated.items():
        given = pairwise(words(command))
        prompts = [re.escape(word) for option, word in given if option == "--prompt"]
        assert re.fullmatch(".+\n".join([*prompts, ""]), output, re.DOTALL), output


def test_a_larger_model_is_tried_and_stops(printed):
    (output,) = outputs(printed, "runs/larger")
    assert "stopped and saved after step 10 of" in output
    assert [path.name for path in Path("runs/larger").glob("iter_*")] == ["iter_0000010"]


def test_adapters_of_the_chats_learn(printed):
    records = read_log(Path("runs/chats") / LOG)
    assert records[0]["loss"] > records[-1]["loss"]
    base, tuned = load_pretrained("runs/base")[0], load_pretrained("runs/chats/exported")[0]
    changed = {
        name
        for (name, old), new in zip(base.named_parameters(), tuned.parameters())
        if not old.equal(new)
    }
    assert {"in_proj", "linear_qkv", "linear_fc2"} <= {name.split(".")[-2] for name in changed}
    assert Path("runs/chats/exported/adapters/adapter_model.safetensors").exists()


def test_the_last_prompt_skips_what_the_others_share(printed):
    (output,) = outputs(printed, "explain")
    skipped, prompt = re.match(r"(\d+) of (\d+) prompt tokens are skipped", output).groups()
    assert 0 < int(skipped) < int(prompt)


def forms(text: str) -> set[str]:
    """Lines of reports, without their numbers."""
    lines = re.findall(r"^(?:step|wrote|stopped|\[\d+ prompt|\d+ (?:of|tokens)) ?.+$", text, re.M)
    return {re.sub(r"\d[\d,.e+-]*", "0", line) for line in lines}


def test_the_page_shows_reports_as_they_are_printed(results):
    shown = set().union(*map(forms, blocks("text")))
    printed = set().union(*(forms(text) for both in results.values() for text in both))
    assert len(shown) > 10 and shown <= printed, shown - printed
