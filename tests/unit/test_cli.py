"""The command line, run in this process on a tiny checkpoint."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from reference import tiny_model

from megatron_hybrid import cli
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.commands import arguments, serve
from megatron_hybrid.commands.arguments import load
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.serving import config
from megatron_hybrid.tools import demo
from megatron_hybrid.tools.info import environment
from megatron_hybrid.tools.profile import read_requests
from megatron_hybrid.utils.field_help import fields_help
from megatron_hybrid.utils.validation import Range, kinds_of, type_hints
from megatron_hybrid.version import __version__

DOCS = Path(__file__).parents[2] / "docs"
PROMPT = "some forty characters of a prompt to skip"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose tokens are the 256 bytes."""
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tiny_model(vocab_size=256), path)
    byte_tokenizer().save(path)
    return str(path)


def test_generate_prints_the_text_and_what_was_skipped(folder, capsys):
    arguments = ["generate", "--model", folder, "--tokens", "5"]
    assert cli.main([*arguments, "--prompt", PROMPT, "--prompt", PROMPT]) == 0
    out, err = capsys.readouterr()
    assert out.count(PROMPT) == 2
    first, second = [line for line in err.splitlines() if line.startswith("[")]
    assert "41 prompt tokens, 0 shared, 0 skipped, no_shared_prefix" in first
    assert "41 prompt tokens, 41 shared, 41 skipped;" in second


def test_generate_goes_on_with_the_cache_of_another_call_and_explain_tells_of_it(
    folder, capsys, tmp_path
):
    cache = tmp_path / "cache"
    arguments = ["--model", folder, "--prompt", PROMPT, "--cache-dir", str(cache)]
    assert cli.main(["explain", *arguments]) == 2
    assert f"--cache-dir {cache} is no folder" in capsys.readouterr().err and not cache.exists()
    outputs = []
    for _ in range(2):
        assert cli.main(["generate", *arguments, "--tokens", "5"]) == 0
        outputs.append(capsys.readouterr())
    assert "0 skipped, no_shared_prefix" in outputs[0].err
    assert "41 skipped, 41 of them fetched;" in outputs[1].err
    assert outputs[0].out == outputs[1].out
    assert cli.main(["explain", *arguments]) == 0
    assert "41 can be fetched: the disk has them" in capsys.readouterr().out
    (cache / "rank-0-of-1" / "index.sqlite3").write_text("{}")
    assert cli.main(["generate", *arguments]) == 2
    assert "file is not a database" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "found"), [("auto", torch.float32), ("float16", torch.float16)])
def test_weights_have_the_number_format_that_was_asked_for(folder, dtype, found):
    model, _ = load(folder, "cpu", dtype)
    assert model.embedding.word_embeddings.weight.dtype == found


def test_demo_runs_all_modes_with_identical_outputs(folder, capsys, monkeypatch):
    monkeypatch.setattr(demo, "SYSTEM_PROMPT", "A system prompt that is shared by all of them. ")
    monkeypatch.setattr(demo, "ANSWER_TOKENS", 3)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["demo", "--model", folder]) == 0
    out = capsys.readouterr().out
    assert "identical outputs" in out and "In short: restore computed" in out
    again = next(line.split() for line in out.splitlines() if "479 again" in line)
    # request, prompt | off: run, ms | memory: shared, run, ms | restore: shared, skipped, run, ms
    assert again[2:4] == ["479", "479"]
    assert (again[5], again[6]) == ("479", "479")
    assert (again[8], again[9], again[10]) == ("479", "479", "0")


def test_info_names_versions_and_optional_libraries(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert environment()["megatron_hybrid"] == __version__
    for name in ("torch", "megatron-core", "Transformer Engine", "apex", "apex, amp_C"):
        assert name in out


def test_generate_and_python_agree_on_what_the_model_says(folder, capsys, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    values = {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 9}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(values))
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "abc"]
    assert cli.main(arguments) == 0
    model, tokenizer = load_pretrained(tmp_path / "model", dtype=torch.float32)
    (result,) = DynamicInferenceEngine(model, tokenizer).generate(["abc"])
    assert len(result.token_ids) == 9
    assert capsys.readouterr().out == f"abc{result.text}\n"
    assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / "copy")]) == 0
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text()) == values
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": "hot"}')
    assert cli.main(arguments) == 2
    assert "generation_config.json of the model has temperature='hot'" in capsys.readouterr().err


def test_a_chat_reuses_its_turns(capsys, monkeypatch):
    lines = ["/help", "/nothing", "/system Tell tales.", "Once upon a time there was a king."]
    lines += ["", "long " * 200, "And then?", "/stats", "/reset"]
    monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))
    arguments = ["chat", "--tokens", "12", "--temperature", "0", "--cache-mib", "32"]
    assert cli.main([*arguments, "--context", "200"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"demo: the cache has 32 MiB, room for [\d,]+ tokens\.\n", out)
    assert "There is no command /nothing." in out and out.count("/system TEXT") == 2
    assert out.count("A new conversation begins.") == 2 and "\nhit_rate " in out
    assert "max_sequence_length" in out  # the question that was too long ends nothing
    found = re.findall(r"\[(\d+) prompt tokens, \d+ shared, (\d+) skipped", out)
    (first, none), (second, skipped) = ([int(n) for n in turn] for turn in found)
    assert none == 0 < first < skipped < second


def test_explain_after_the_prompts_before_it(folder, capsys):
    arguments = ["explain", "--model", folder, "--prompt", PROMPT]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("0 of 41 prompt tokens are skipped (0.0%)")
    assert cli.main([*arguments, "--prompt", PROMPT + ", and more"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("41 of 51 prompt tokens are skipped (80.4%), KV of 41 is shared\n")
    assert "stops at 41: what follows is new" in out


@pytest.mark.parametrize("command", ["plan", "info", "explain"])
def test_what_is_printed_fits_80_columns(command, capsys):
    arguments = {
        "plan": ["--model", "demo", "--device", "h100", "--context", "100k"],
        "info": [],
        "explain": ["--prompt", "once upon a time there was", "--prompt", "once upon a time, a"],
    }
    assert cli.main([command, *arguments[command]]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_plan(folder, capsys):
    assert cli.main(["plan", "--model", folder, "--memory", "0.1GB", "--context", "1k"]) == 0
    table = capsys.readouterr().out
    assert "KV per token" in table and "that prefixes have room:\nInferenceConfig(\n" in table
    assert cli.main(["plan", "--model", folder, "--memory", "0.1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["context"] == 8000 and values["model"]["largest_batch"] > 0
    assert cli.main(["plan", "--model", folder, "--memory", "0.0001"]) == 1
    table = capsys.readouterr().out
    assert "KV per token" in table and "no room: the weights take" in table


def test_plan_of_a_published_shape_on_a_device(capsys):
    arguments = ["plan", "--model", "nemotron_h_8b", "--device", "h100"]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert "8,100,852,736 parameters" in table and "80 GB of memory" in table
    speed = table[table.index("at best on H100 SXM: 989 TFLOP/s in bf16, 3.35 TB/s") :]
    assert speed in (DOCS / "measured" / "gpu.md").read_text(encoding="utf-8")
    numbers = ["--flops", "798", "--bandwidth", "3.0", "--memory", "60", "--json"]
    assert cli.main([*arguments, *numbers]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["memory_bytes"] == 60 * 10**9
    assert values["rates"]["device"]["flops"] == 798e12
    step = values["rates"]["decode"][0]
    assert step["tokens_per_second"] == pytest.approx(3.0 / 3.35 * 216.6, rel=1e-2)


@pytest.mark.parametrize("command", ["plan --memory", "plan --flops", "profile x --memory"])
@pytest.mark.parametrize("given", ["inf", "nan", "0", "-1", "abc", ""])
def test_a_size_or_a_speed_that_is_none(command, given, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), given, "--model", "demo"])
    assert re.search(f"'{given}': give .*above 0", capsys.readouterr().err)


def test_profile(folder, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "{"a" * 70}"}}\n' * 2)  # 70 tokens
    arguments = ["profile", str(prompts), "--model", folder, "--memory", "0.01"]
    assert cli.main(arguments) == 0
    assert "2 prompts, 140 tokens" in capsys.readouterr().out
    assert cli.main([*arguments, "--json", "--state-encoding", "int8"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["prompt_tokens"], values["state_encoding"]) == (140, "int8")
    skipped = {each["name"]: each["skipped_percent"] for each in values["caches"]}
    assert skipped["this engine, any token"] == 50.0
    prompts.write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    assert cli.main(arguments) == 2
    assert "prompts.jsonl, line 2: `prompt` is 1: give text" in capsys.readouterr().err


def test_names_that_plan_knows_work_in_profile(tmp_path, monkeypatch):
    replay = Mock(side_effect=ValueError("told"))
    monkeypatch.setattr("megatron_hybrid.tools.profile.profile", replay)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    arguments = ["profile", str(tmp_path / "prompts.jsonl"), "nemotron_h_8b", "--memory", "1"]
    assert cli.main(arguments) == 2
    requests, config, *_ = replay.call_args.args
    assert (len(requests), config.vocab_size) == (1, 131072)


def test_profile_of_chats_and_of_the_demo_model(folder, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hello"}]
    prompts.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"prompt": chat}) + "\n")
    arguments = ["profile", str(prompts), "--memory", "0.01", "--model"]
    assert cli.main([*arguments, folder]) == 2
    assert "this tokenizer has no chat template" in capsys.readouterr().err
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    (Path(folder) / "chat_template.jinja").write_text(template)
    assert cli.main([*arguments, folder]) == 0
    assert "2 prompts, 26 tokens" in capsys.readouterr().out  # "user: Hello. " twice
    messages = [{"role": "system", "content": "Hi"}, *chat]
    prompts.write_text(json.dumps({"messages": messages}) + "\n")
    (request,) = read_requests(prompts, folder, 256)
    assert len("system: Hi. ") in request.message_starts
    prompts.write_text('{"prompt": [{"content": "Hello"}]}\n')
    assert cli.main([*arguments, folder]) == 2
    assert "line 1: message 0 of the chat has the role None" in capsys.readouterr().err

    prompts.write_text('{"prompt": "Once upon a time"}\n' * 2)
    assert cli.main([*arguments, "demo"]) == 0
    assert cli.main(["plan", "--model", "demo", "--memory", "1"]) == 0


def test_convert_says_what_is_wrong(folder, capsys, tmp_path):
    assert cli.main(["convert", folder, str(tmp_path / "copy"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'copy'}\n"
    assert cli.main(["convert", str(tmp_path / "copy"), str(tmp_path / "copy")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "demo", "--tokens", "0"], "argument --tokens: '0': give a whole number from 1"),
        (["quantize", "demo", "q", "--to", "int4", "--text", __file__, "--tokens", "1"], "least 2"),
        (["quantize", "demo", "q", "--to", "int4", "--device", "cpu"], "which needs --text FILE"),
        (["quantize", "none", "x", "--to", "fp8"], "not a folder"),
        (["serve", "--otlp-traces-endpoint", "x"], "otlp_traces_endpoint is 'x'; give a URL"),
        (["serve", "--root-path", "llm"], "root_path is 'llm'; it must begin with a /"),
        (["preprocess", "x", "--tokenizer", "demo", "--train-on", "last"], "add --chat"),
        (["plan", "--train", "demo", "--num-gpus", "0"], "'0': give a whole number from 1 on"),
        (["train", "demo", "--folder", "a/b"], "train.idx does not exist"),
        (["train", "laptop", "run.steps=many", "--folder", "a"], "steps is 'many'"),
        (
            ["train", "laptop", "run.steps=x", "--folder", "a", "run.steps=3", "run.x=4"],
            "field 'x'",
        ),
        (["convert", "demo", "hf", "--to", "huggingface"], "has no huggingface_config"),
        (["plan", "demo"], "give --memory GB or --device NAME"),
        (["plan", "demo", "--device", "abacus"], "--device is 'abacus'; use one of ['a100', 'b2"),
        (["plan", "demo", "--memory", "1", "--flops", "10"], "without --device give --flops, --ba"),
        (["plan", "laptop", "--device", "h100"], "set model.vocab_size"),
        (["plan", "none.yaml", "--device", "h100"], "none.yaml cannot be read as a recipe"),
        (["explain", "x", "--prompt", "x", "--cache-mib", "0"], "--cache-mib: cache_bytes is 0"),
        (["convert", "demo", "/dev/null"], "/dev/null is a file. Name a folder"),
        (["serve", "demo", "--max-model-len", "1"], "no --max-model-len: use --context\n"),
        (["explain", "x", "--prompt", "x", "--mode", "on"], "--mode: prefix_caching is 'on'"),
        (["doctor", "none"], "none is not there: name a folder or a config.json.\n"),
        (["serve", "x", "--adapter", "a=b"], "--max-adapters: max_adapters is 0; --adapter needs"),
        (["serve", "x", "--adapter", "a=b", "--max-adapters", "1"], "b has no adapters to read"),
        (["train", "laptop", "--fodler", "x"], "--fodler"),
        (["info", "more"], "more"),
        (["generate", "--model", "/nowhere", "--prompt", "x"], "/nowhere is not a folder"),
        *(
            (["generate", "--prompt", "x", *options], message)
            for options, message in (
                (["--device", "nowhere"], "device is 'nowhere'; use 'cpu', 'cuda'"),
                (["--mode", "on"], "prefix_caching is 'on'"),
                (["--temperature", "-1"], "temperature"),
                (["--tokens", "100000"], "max_sequence_length"),
                (["--context", "5", "--tokens", "6"], "max_sequence_length=5"),
                (["--context", "much"], "'much' is no number of tokens"),
                (["--memory-fraction", "1.5"], "fraction is 1.5; it must be a number above 0"),
                (["--cache-mib", "0"], "cache_bytes is 0; it must be a whole number from 1"),
                (["--cache-mib", "1000000000"], "cpu has "),
                (["--host-cache-mib", "1000000000"], "Lower host_cache_bytes"),
            )
        ),
    ],
)
def test_a_refused_command_says_why_and_leaves_nothing(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    try:
        program, status, help_lines = "megatron-hybrid", cli.main(arguments), []
    except SystemExit as end:
        program, status = f"megatron-hybrid {arguments[0]}", end.code
        help_lines = [f"See {program} --help.\n"]
    error, *more = capsys.readouterr().err.splitlines(keepends=True)
    assert status == 2 and message in error and more == help_lines
    assert error.startswith(f"{program}: ")
    assert not list(tmp_path.iterdir())


NEEDED = {
    "demo": [],
    "generate": ["--prompt", "x"],
    "explain": ["--prompt", "x"],
    "serve": [],
    "chat": [],
    "plan": [],
    "profile": ["prompts.jsonl", "--memory", "1"],
}
"""Command with a model -> its other arguments that have to be there."""


@pytest.mark.parametrize("command", NEEDED)
def test_a_model_is_given_in_the_same_way_in_all_commands(command, capsys):
    read, needed = cli.command_parser(command).read, NEEDED[command]
    assert read([*needed, "FOLDER"]).model == "FOLDER"
    assert read(["--model", "FOLDER", *needed]).model == "FOLDER"
    if command in ("plan", "profile"):
        with pytest.raises(SystemExit):
            read(needed)
        assert "give a model, as MODEL or as --model MODEL" in capsys.readouterr().err
    else:
        assert read(needed).model == "demo"
    with pytest.raises(SystemExit):
        read([*needed, "A", "--model", "B"])
    assert "the model is given twice" in capsys.readouterr().err


def fields_given(monkeypatch, owner, name, *options) -> dict:
    """The fields with which `serve` calls a function."""
    found = {}

    def note(*_, **fields):
        found.update(fields)
        sys.exit()

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(owner, name, note)
        cli.main(["serve", *options])
    return found


def test_a_server_warms_up_unless_it_is_told_not_to(monkeypatch):
    for options in ([], ["--no-warm-up"]):
        given = fields_given(monkeypatch, arguments, "inference_config", *options)
        assert given["warm_up"] is not bool(options)


def test_a_part_for_multi_token_prediction_is_loaded_to_draft_with_it_alone(monkeypatch):
    given = []
    monkeypatch.setattr(arguments, "load", lambda *place, **sizes: given.append(place[3]) or "mt")
    for command, *options in (["serve"], ["serve", "--speculation", "mtp"], ["chat"]):
        arguments.load_for_chats(cli.command_parser(command).read(options))
    assert given == [False, True, False]


def test_every_setting_of_the_server_has_an_option_that_reaches_it(monkeypatch):
    own = config.ServingConfig
    flags = [name for name, field in own.__dataclass_fields__.items() if field.type is bool]
    options = [serve.SETTINGS[name][0] for name in flags]
    numbers = ["--max-waiting", "3", "--queue-timeout", "4", "--max-body-mib", "5"]
    options += [*numbers, "--served-model-name", "mine"]
    found = asdict(own(**fields_given(monkeypatch, config, "ServingConfig", *options)))
    assert len(flags) > 5 and all(found[name] is True for name in flags)
    assert (found["max_waiting"], found["queue_seconds"]) == (3, 4)
    assert found["max_body_bytes"] == 5 << 20
    assert found["model_name"] == "mine" and found.keys() - serve.SETTINGS == {"description"}


def test_keys_of_clients_and_of_the_operator_need_not_be_on_the_command_line(monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_HYBRID_API_KEYS", "a,b, a")
    monkeypatch.setenv("MEGATRON_HYBRID_ADMIN_KEYS", "root,")
    keys = ["--api-key", "b", "--admin-key", "other"]
    for options, expected in (
        ([], (("a", "b"), ("root",))),
        (keys, (("b", "a"), ("other", "root"))),
    ):
        given = fields_given(monkeypatch, config, "ServingConfig", *options)
        assert (given["api_keys"], given["admin_keys"]) == expected
    for option in ("--api-key", "--admin-key"):
        with pytest.raises(SystemExit):
            cli.main(["serve", option, " "])
        assert f"argument {option}: the key is empty" in capsys.readouterr().err
    for variable in ("MEGATRON_HYBRID_API_KEYS", "MEGATRON_HYBRID_ADMIN_KEYS"):
        with monkeypatch.context() as unset:
            unset.setenv(variable, " ,")  # of a secret that was not found
            assert cli.main(["serve"]) == 2
        assert f"{variable} holds no key" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_help_text_is_a_sentence_and_fits_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = cli.command_parser(command)
    about = [action.help for action in parser._actions if action.dest != "help"]
    for text in (parser.description, *about):
        assert re.fullmatch(r"[A-Z].*\.", text), text
    shown = parser.format_help()
    assert max(map(len, shown.splitlines())) <= 80
    defaults = re.findall(r"default: (.*?)\)", " ".join(shown.split()))
    assert not {"None", "False", "inf", "[]"} & set(defaults)
    assert defaults or command in ("demo", "doctor", "info", "train")


def test_the_list_of_commands_fits_80_columns(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert max(map(len, out.splitlines())) <= 80
    assert cli.main([]) == 2
    assert capsys.readouterr().err == out
    with pytest.raises(SystemExit):
        cli.main(["help"])
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serv"], "there is no command 'serv': did you mean serve?"),
        (["frob", "--help"], "there is no command 'frob': the commands are demo, generate, chat,"),
        (["--port", "3"], "unrecognized arguments: --port"),
    ],
)
def test_a_wrong_command_is_answered_with_the_nearest(capsys, arguments, told):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert capsys.readouterr().err.startswith(f"megatron-hybrid: {told}")


def test_a_program_with_the_options_of_a_command_knows_the_names_of_others(capsys):
    parser = arguments.CommandParser("serve", "Serve.", "python -m worker")
    arguments.add_served_engine(parser)
    for option, told in (("--max-num-seqs", "use --max-requests"), ("--top-k", "give it with")):
        with pytest.raises(SystemExit, match="2"):
            parser.read([option, "1"])
        assert f"python -m worker: there is no {option}: {told}" in capsys.readouterr().err
    assert parser.read(["--max-requests", "1"]).option_of["max_requests"] == "--max-requests"


def test_a_reader_that_has_seen_enough_is_no_error():
    """As with `| head`: what is left is written when the command is over."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from megatron_hybrid import cli; sys.exit(cli.reported(print, None))"
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


SET_FIELDS = {"generate": 7, "chat": 7, "explain": 7, "serve": 40, "profile": 1, "plan": 1}
COUNT_WITH = {("plan", "num_speculative_tokens"), ("plan", "cuda_graphs")}
"""Options with the name of a field that they do not set."""


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_that_set_a_field_have_its_help_and_default(command):
    """A sentence is written once, at the field."""
    parser, found = cli.command_parser(command), 0
    known = fields_help(arguments.ENGINE) | fields_help(arguments.SERVER)
    for action in parser._actions:
        name = action.dest if action.dest in known else re.findall(r"\((\w+)\)", action.help)[-1:]
        name = name if isinstance(name, str) else "".join(name)
        if name not in known or (command, name) in COUNT_WITH:
            continue
        found += 1
        about = known[name]
        assert action.help.startswith(about.sentence[:-1].replace("%", "%%"))
        assert about.default is None or str(action.default) == str(about.default)
        assert action.limits == about.wanted
        if about.kind and name != "max_sequence_length":
            assert type(action.type("2")) is about.kind
            with pytest.raises(ArgumentTypeError, match=f"'two': give {about.wanted}"):
                action.type("two")
    assert found == SET_FIELDS.get(command, 0)


@pytest.mark.parametrize("of", [arguments.ENGINE, arguments.SERVER, arguments.SAMPLING])
def test_help_has_the_limits_that_a_config_checks(of):
    module, _, name = of.rpartition(".")
    for field, hint in type_hints(getattr(import_module(module), name)).items():
        about, kind = fields_help(of)[field], kinds_of(hint)[0]
        checked = [each for each in get_args(kind) if isinstance(each, Range)]
        number = get_args(kind)[0] if checked else kind
        assert about.kind is (number if number in (int, float) else None), field
        if about.kind:
            (limits,) = checked or [Range(ge=0) if number is int else Range()]
            small = {k: v for k, v in vars(limits).items() if v is not None and abs(v) < 1 << 32}
            assert about.limits == Range(**small), field
