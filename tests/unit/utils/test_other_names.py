"""Names of other libraries: each is answered with a name that is there, or not guessed at."""

import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from transformers import GenerationConfig, TrainingArguments

import megatron_hybrid as mh
from megatron_hybrid import cli
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.utils.field_help import fields_help
from megatron_hybrid.utils.other_names import CONFIGS, SECTIONS, Target, advice, rows, table

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "other_names.md"
LISTS = Path(__file__).parent / "foreign_names"
FOREIGN = {path.stem: path.read_text().split("\n", 1)[1].split() for path in LISTS.glob("*.txt")}
FOREIGN["transformers"] = [*GenerationConfig().to_dict()]
FOREIGN["transformers"] += [field.name for field in fields(TrainingArguments)]
FOREIGN["table"] = [name for row in rows() for names in row.libraries.values() for name in names]


def names_of(fielded) -> list[str]:
    return [field.name for field in fields(fielded)]


def places() -> dict[str, list[str]]:
    """Every place -> the names that are there."""
    recipe = Recipe.load("laptop")
    known = {name: names_of(getattr(mh, name)) for name in CONFIGS}
    known["load_pretrained"] = ["folder", "device", "dtype", "mtp", *names_of(HybridConfig)]
    known |= {name: names_of(getattr(recipe, name)) for name in SECTIONS[:5]}
    for command in cli.COMMANDS:
        known[f"megatron-hybrid {command}"] = [*cli.command_parser(command)._option_string_actions]
    return known


PLACES = places()
OPTIONS = {name for known in PLACES.values() for name in known if name.startswith("--")}


def is_there(target: Target) -> bool:
    if not target.owner:
        return target.name in OPTIONS
    known = PLACES.get(target.owner) or PLACES[f"megatron-hybrid {target.owner}"]
    return target.name in known


def test_all_that_the_table_advises_is_there():
    assert [target for row in rows() for target in row.targets if not is_there(target)] == []
    for name, source in CONFIGS.items():
        assert list(fields_help(source)) == PLACES[name]


@pytest.mark.parametrize("place", PLACES)
def test_a_foreign_name_is_told_rightly_or_not_guessed_at(place):
    known = set(PLACES[place])
    told = set()
    for name in {name for names in FOREIGN.values() for name in names}:
        name = f"--{name.replace('_', '-')}" if place.startswith("megatron-hybrid") else name
        answer = None if name in known else advice(place, name, known)
        if answer is None:
            continue
        if guess := re.fullmatch(r"did you mean (.*)\?", answer):
            assert re.sub(r"\W|_", "", name) == re.sub(r"\W|_", "", guess[1]), answer
            continue
        told.add(answer)
        option = r"(--[\w-]+|\w+)(?:=[^ ,]+)?"
        if own := re.match(f"use {option}(?: and {option})?(?=$|,| for| to)", answer):
            assert known >= {name for name in own.groups() if name}, (name, answer)
        for owner, given in re.findall(r"(\w+)\(((?:\w+=[^,()]+(?:, )?)+)\)", answer):
            assert set(re.findall(r"(\w+)=", given)) <= set(PLACES[owner]), answer
    assert len(told) > 30


@pytest.mark.parametrize("place", [*CONFIGS, "load_pretrained", "megatron-hybrid serve"])
def test_a_wrong_name_raises_the_advice(place, capsys):
    call = getattr(mh, place, None)
    if place == "load_pretrained":
        call = partial(mh.load_pretrained, "nowhere")
    parser = cli.command_parser("serve")
    for name in FOREIGN["table"]:
        if call is None:
            name = f"--{name.replace('_', '-')}"
            if name not in PLACES[place]:
                with pytest.raises(SystemExit, match="2"):
                    parser.read(["demo", name, "1"])
                remedy = advice(place, name, PLACES[place])
                told = f"no {name}: {remedy}\n" if remedy else f"no {name}\n"
                assert told in capsys.readouterr().err
        elif name not in PLACES[place]:
            with pytest.raises(TypeError, match=f"no (field|argument) '{name}': ") as raised:
                call(**{name: 1})
            assert (advice(place, name, PLACES[place]) or "") in str(raised.value)


@pytest.mark.parametrize(
    ("place", "name", "told"),
    [
        ("SamplingParams", "length_penalty", "leave it out: there is no beam search"),
        ("SamplingParams", "priority", "use RequestOptions(priority=...)"),
        ("RequestOptions", "temperature", "use SamplingParams(temperature=...)"),
        ("InferenceConfig", "tp_size", "use load_pretrained(tensor_model_parallel_size=...)"),
        ("load_pretrained", "cache_dir", "leave it out: models are read from folders alone"),
        ("megatron-hybrid chat", "--max_model_len", "use --context"),
        ("megatron-hybrid chat", "--max-num-queued-reqs", "use `megatron-hybrid serve --max-wait"),
        ("megatron-hybrid train", "--lr", "use the recipe's optimizer.learning_rate"),
        ("InferenceConfig", "cache_byte", "did you mean cache_bytes?"),
        ("megatron-hybrid serve", "--cache-mb", "did you mean --cache-mib?"),
        ("run", "stesp", "did you mean steps?"),
        ("SamplingParams", "top_a", None),
        ("tools[0]", "stop", None),
    ],
)
def test_answers(place, name, told):
    answer = advice(place, name, PLACES.get(place, ()))
    assert answer is None if told is None else answer.startswith(told)


def test_an_unknown_name_is_answered_with_all():
    with pytest.raises(TypeError, match="no field 'zzz': its fields are guide, salt"):
        mh.RequestOptions(zzz=1)
    with pytest.raises(TypeError, match="no argument 'zzz': its arguments are folder, device"):
        mh.load_pretrained("demo", zzz=1)
    with pytest.raises(TypeError, match="give a dtype, such as torch"):
        mh.load_pretrained("demo", dtype="bfloat16")


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")
