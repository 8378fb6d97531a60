"""Names of other libraries: each is answered with a name that is there, or not guessed at."""

import asyncio
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import GenerationConfig, TrainingArguments

import megatron_hybrid as mh
from docs_tools.reference import other_names
from megatron_hybrid import cli
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.serving.protocols.fields import ChatFields, CompletionFields
from megatron_hybrid.serving.protocols.messages import MessageFields
from megatron_hybrid.serving.protocols.responses import ResponseFields
from megatron_hybrid.training.recipe import DataFields, DpoFields, GrpoFields, LoraFields, Recipe
from megatron_hybrid.utils.field_help import fields_help
from megatron_hybrid.utils.other_names import CONFIGS, SECTIONS, Target, advice, attributes_of, rows

BODIES = CompletionFields, ChatFields, MessageFields, ResponseFields
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "other_names.md"
LISTS = Path(__file__).parent / "foreign_names"
FOREIGN = {path.stem: path.read_text().split("\n", 1)[1].split() for path in LISTS.glob("*.txt")}
FOREIGN["transformers"] = [*GenerationConfig().to_dict()]
FOREIGN["transformers"] += [field.name for field in fields(TrainingArguments)]
HELD_EVERYWHERE = [row.libraries for row in rows() if not row.places]
FOREIGN["table"] = [name for of in HELD_EVERYWHERE for names in of.values() for name in names]


def names_of(fielded) -> list[str]:
    return [field.name for field in fields(fielded)]


def places() -> dict[str, list[str]]:
    """Every place -> the names that are there."""
    recipe = Recipe(
        "model", "tokenizer", DataFields(1), lora=LoraFields, dpo=DpoFields, grpo=GrpoFields
    )
    known = {name: names_of(getattr(mh, name)) for name in CONFIGS}
    own = ("folder", "device", "dtype", "mtp", *names_of(HybridConfig))
    known["load_pretrained"] = known["load_pretrained()"] = [*own]
    known["HybridConfig"] = names_of(HybridConfig)
    known["model"] = ["pretrained", *known["HybridConfig"]]
    known["request"] = [*set().union(*(kind.model_fields for kind in BODIES))]
    for call in (mh.DynamicInferenceEngine, mh.AsyncEngine.generate, mh.AsyncEngine.stream):
        known[f"{call.__qualname__}()"] = [*inspect.signature(call).parameters]
    known |= {name: names_of(getattr(recipe, name)) for name in SECTIONS[:-2]}
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
    assert len(told) > 20


@pytest.mark.parametrize(
    ("place", "name", "told"),
    [
        ("SamplingParams", "length_penalty", "leave it out: there is no beam search"),
        ("SamplingParams", "priority", "use RequestOptions(priority=...)"),
        ("RequestOptions", "temperature", "use SamplingParams(temperature=...)"),
        ("InferenceConfig", "tp_size", "use load_pretrained(tensor_model_parallel_size=...)"),
        ("load_pretrained()", "cache_dir", "leave it out: models are read from folders alone"),
        ("megatron-hybrid chat", "--max_model_len", "use --context"),
        ("megatron-hybrid chat", "--max-num-queued-reqs", "use `megatron-hybrid serve --max-wait"),
        ("megatron-hybrid train", "--lr", "use the recipe's optimizer.learning_rate"),
        ("InferenceConfig", "cache_byte", "did you mean cache_bytes?"),
        ("megatron-hybrid serve", "--cache-mb", "did you mean --cache-mib?"),
        ("HybridConfig", "num_key_value_heads", "use num_query_groups"),
        ("HybridConfig", "torch_dtype", "use params_dtype"),
        ("AsyncEngine.generate()", "max_tokens", "use SamplingParams(num_tokens_to_generate=...)"),
        ("DynamicInferenceEngine.generate()", "guide", "use RequestOptions(guide=...)"),
        ("run", "folder", "use `megatron-hybrid train --folder`"),
        ("model", "model_name_or_path", "use pretrained"),
        ("run", "tp_size", "use the recipe's model.tensor_model_parallel_size"),
        ("megatron-hybrid serve", "--enable-lora", "use --max-adapters"),
        ("run", "max_num_seqs", None),
        ("SamplingParams", "top_a", None),
        ("tools[0]", "stop", None),
    ],
)
def test_answers(place, name, told):
    answer = advice(place, name, PLACES.get(place, ()))
    assert answer is None if told is None else answer.startswith(told)


def entries():
    """All that is called or made by the names of the package, and the methods of its engines."""
    for name in mh.__all__:
        entry = getattr(mh, name)
        if inspect.isfunction(entry) or name in ("HybridConfig", *CONFIGS):
            yield entry
    for engine in (mh.DynamicInferenceEngine, mh.AsyncEngine):
        yield engine
        for name, method in inspect.getmembers(engine, inspect.isfunction):
            if name[0] != "_" and len(inspect.signature(method).parameters) > 1:
                yield method


@pytest.mark.parametrize("entry", [*entries()], ids=lambda entry: entry.__qualname__)
def test_every_entry_answers_wrong_arguments(entry):
    with pytest.raises(TypeError, match=r"has no \w+ 'zzz': its (argument|field)s are"):
        asyncio.run(entry(zzz=1))
    with pytest.raises(TypeError, match=r"has no \w+ 'max_model_len': use .*max_sequence_length"):
        asyncio.run(entry(max_model_len=1))


def test_every_attribute_of_others_is_answered():
    model, tokenizer = mh.load_pretrained("demo")
    config = mh.InferenceConfig(cache_bytes=32 << 20)
    engine = mh.DynamicInferenceEngine(model, tokenizer, config)
    [result] = engine.generate("Once", mh.SamplingParams(num_tokens_to_generate=1))
    for owner in (model, tokenizer, engine, result, mh):
        advised = attributes_of(getattr(owner, "__name__", type(owner).__name__))
        assert advised
        for asked, told in advised.items():
            with pytest.raises(AttributeError, match=f"no attribute '{asked}': {re.escape(told)}"):
                getattr(owner, asked)
    with pytest.raises(AttributeError, match="no attribute 'from_pretrained': use load_pretr"):
        mh.HybridModel.from_pretrained  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute '__call__': use encode"):
        tokenizer("Once")


def test_the_page_has_the_table():
    assert other_names() in PAGE.read_text(encoding="utf-8")
