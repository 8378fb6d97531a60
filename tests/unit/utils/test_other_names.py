"""Names of other libraries: each is answered with a name that is there."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import megatron_hybrid as mh
from megatron_hybrid import cli
from megatron_hybrid.utils.other_names import OTHER_NAMES, table

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "other_names.md"
SERVE = "megatron-hybrid serve"
ROWS = [(owner, name, remedy) for owner, rows in OTHER_NAMES.items() for name, _, remedy in rows]


def known_names(owner: str) -> set[str]:
    if owner == SERVE:
        return set(cli.command_parser("serve")._option_string_actions)
    if owner == "load_pretrained":
        return {*inspect.signature(mh.load_pretrained).parameters, *known_names("HybridConfig")}
    return {field.name for field in fields(getattr(mh, owner))}


def error_of(owner: str, name: str, capsys) -> str:
    if owner == SERVE:
        with pytest.raises(SystemExit):
            cli.main(["serve", f"{name}=1"])
        return capsys.readouterr().err
    where = ("nowhere",) if owner == "load_pretrained" else ()
    with pytest.raises(TypeError) as raised:
        getattr(mh, owner)(*where, **{name: 1})
    return str(raised.value)


@pytest.mark.parametrize("owner", OTHER_NAMES)
def test_each_name_is_answered_with_one_that_is_there(owner, capsys):
    known = known_names(owner)
    for name, remedy in [row[1:] for row in ROWS if row[0] == owner]:
        assert name not in known
        error = error_of(owner, name, capsys)
        assert name in error and remedy in error
        for other, inner in re.findall(r"([A-Z]\w+|load_pretrained)\((\w+)=", remedy):
            assert inner in known_names(other), remedy
        if found := re.match(r"use (--[\w-]+|\w+)(?!\w|\()", remedy):
            assert found[1] in known, remedy


def test_an_unknown_name_is_answered_with_a_near_one_or_all(capsys):
    with pytest.raises(TypeError, match="no field 'cache_byte': did you mean cache_bytes"):
        mh.InferenceConfig(cache_byte=1)
    with pytest.raises(TypeError, match="no field 'zzz': its fields are guide, salt"):
        mh.RequestOptions(zzz=1)
    with pytest.raises(TypeError, match="no argument 'zzz': use a field of HybridConfig"):
        mh.load_pretrained("demo", zzz=1)
    assert "there is no --cache-mb: did you mean --cache-mib?" in error_of(
        SERVE, "--cache-mb", capsys
    )
    with pytest.raises(TypeError, match="give a dtype, such as torch"):
        mh.load_pretrained("demo", dtype="bfloat16")


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")
