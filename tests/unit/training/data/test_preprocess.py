"""preprocess: files of documents to a dataset, whole or not at all."""

import gzip
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pytest
import tokenizers
from matrix import matrix_rows
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from pyarrow import parquet
from rank_processes import rank_context
from waiting import is_running, wait_until

from megatron_hybrid import cli
from megatron_hybrid.serving.protocols.fields import ChatFields
from megatron_hybrid.serving.protocols.request_mapping import chat_prompt
from megatron_hybrid.text import document_files
from megatron_hybrid.text.document_encoder import SPAN, encode_all, token_dtype
from megatron_hybrid.text.document_files import read_chunks
from megatron_hybrid.text.tokenizer import Tokenizer, train_tokenizer
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.data.preprocess import preprocess, train_and_save_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["Once upon a time there was a fox. "] * 9, 300).save(path)
    (path / "chat_template.jinja").write_text(CHATML)
    return path


def write_lines(path: Path, records) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix in (".gz", ".zst"):  # of two members, as parallel compressors write it
        pack = gzip.compress if path.suffix == ".gz" else pyarrow.Codec("zstd").compress
        text = b"".join(bytes(pack(part)) for part in (text[:999], text[999:]))
    path.write_bytes(text)
    return path


def save_to_disk(folder: Path, records) -> Path:
    """The files of `Dataset.save_to_disk`, of two shards."""
    folder.mkdir(parents=True)
    names = [f"data-0000{shard}-of-00002.arrow" for shard in range(2)]
    for name, part in zip(names, (records[:3], records[3:])):
        table = pyarrow.Table.from_pylist(part)
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table, max_chunksize=400)
    write_lines(folder / "state.json", [{"_data_files": [{"filename": name} for name in names]}])
    return folder


def texts(count: int) -> list[str]:
    return [f"Fox {i} was there.\n" + "Zażółć 漢🙂 " * (i % 7) for i in range(count)]


def stored(prefix) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def expected(folder, documents, end=True) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.tokenize(text) + [tokenizer.eod] * end for text in documents]


def test_every_format_and_any_number_of_workers_give_the_same_dataset(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(document_files, "CHUNK_BYTES", 2000)  # many chunks
    documents = texts(300)
    records = [{"id": i, "text": text} for i, text in enumerate(documents)]
    plain = write_lines(tmp_path / "a.jsonl", records[:200])
    zipped = write_lines(tmp_path / "b.jsonl.gz", records[200:250])
    files = [plain, zipped, write_lines(tmp_path / "c.jsonl.zst", records[250:])]
    parts = []
    for workers in (1, 3):
        made = preprocess(files, folder, tmp_path / f"with_{workers}", workers=workers)
        parts.append(stored(tmp_path / f"with_{workers}"))
        assert made.documents == 300 and made.tokens == sum(map(len, parts[-1]))
    assert parts[0] == parts[1] == expected(folder, documents)
    assert sorted(p.name for p in tmp_path.glob("with_1*")) == [
        "with_1.bin",
        "with_1.idx",
        "with_1.json",
    ]


def test_text_files_are_documents_or_lines_of_them(folder, tmp_path):
    documents = ["one\ntwo\n\n", "\ufeffthree漢\r\nfour"]
    paths = [tmp_path / "a.txt", tmp_path / "b.txt.gz"]
    paths[0].write_bytes(documents[0].encode())
    paths[1].write_bytes(gzip.compress(documents[1].encode()))
    preprocess(paths, folder, tmp_path / "whole", append_eod=False)
    whole = [documents[0], documents[1].removeprefix("\ufeff")]
    assert stored(tmp_path / "whole") == expected(folder, whole, end=False)
    preprocess(paths, folder, tmp_path / "lines", one_per_line=True)
    assert stored(tmp_path / "lines") == expected(folder, ["one", "two", "three漢", "four"])


def test_token_ids_are_stored_as_core_stores_them():
    for size in (10, 65499, 65500, 1 << 20):
        assert token_dtype(size) is DType.optimal_dtype(size)


def conversation(i: int) -> list[dict]:
    return [
        {"role": "user", "content": f"question {i}"},
        {"role": "assistant", "content": f"answer {i} 漢", "weight": 0.25},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "no" * i},
    ]


def spans_of(prefix):
    return [np.array(each, np.int32).view(SPAN).tolist() for each in stored(f"{prefix}.spans")]


def test_conversations_keep_their_answers(folder, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": conversation(i)} for i in range(40)])
    made = preprocess([path], folder, tmp_path / "chats", chat=True, workers=2)
    tokenizer = Tokenizer.from_folder(folder)
    pairs = [tokenizer.chat_with_answers(conversation(i)) for i in range(40)]
    assert stored(tmp_path / "chats") == [ids for ids, _ in pairs]
    assert spans_of(tmp_path / "chats") == [spans for _, spans in pairs]
    assert made.answer_tokens == sum(b - a for _, spans in pairs for a, b, _ in spans)
    fields = DataFields(1000, kind="sft", train=[str(tmp_path / "chats")])
    train, _, _ = build_datasets(fields, tokenizer, (None, 0, 0))
    learnt = [
        tokenizer.decode([token for token, counts in zip(labels.tolist(), mask) if counts], False)
        for row in (train[i] for i in range(len(train)))
        for labels, mask in zip(
            row["labels"].split(row["lengths"]), row["loss_mask"].split(row["lengths"])
        )
    ]
    end = "<|endoftext|>"
    answers = [f"answer {i} 漢{end}{'no' * i}{end}" for i in range(40)]
    assert sorted(filter(None, learnt)) == sorted(answers)


def test_conversations_are_rendered_as_by_the_server(folder, tmp_path):
    """Contents as parts, arguments and tools as text; a developer; a template for training."""
    call = {"function": {"name": "look", "arguments": '{"q": "sea"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "assistant", "content": [{"type": "text", "text": "yo"}], "train": None},
    ]
    shutil.copytree(folder, tmp_path / "model")
    marked = (
        "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments.q }}{% endfor %}{% endgeneration %}"
        "{% endfor %}{{ tools[0].function.name }}"
    )
    plain = re.sub("{% (end)?generation %}", "", marked)
    (tmp_path / "model" / "chat_template.jinja").write_text(plain)
    tools = [{"type": "function", "function": {"name": "t"}}]
    record = {"messages": messages, "tools": json.dumps(tools)}
    path = write_lines(tmp_path / "a.jsonl", [record])
    options = {"chat": True, "train_on": "last", "training_template": marked}
    preprocess([path], tmp_path / "model", tmp_path / "chats", **options)
    ((ids,), (((start, end, _),),)) = stored(tmp_path / "chats"), spans_of(tmp_path / "chats")
    tokenizer = Tokenizer.from_folder(tmp_path / "model")
    fields = ChatFields(messages=messages, tools=tools, add_generation_prompt=False)
    assert list(chat_prompt(tokenizer, fields).tokens) == ids
    assert tokenizer.decode(ids, False) == "<|system|>Be kind.<|assistant|>sosea<|assistant|>yot"
    assert tokenizer.decode(ids[start:end]) == "yo"


# What does not fit -------------------------------------------------------------------------------

BROKEN = [
    (b"{", r":2 is not JSON: "),
    (b"[1]", r":2 is not an object with a field 'text'"),
    (b'{"body": 1, "id": 2}', r":2 has no field 'text', but 'body', 'id'; choose one by --key"),
    (b'{"text": 2}', r":2 has no text in 'text', but 2"),
    (b'{"text": "\\ud83d"}', r":2 has a 'text' that has \\ud83d, half of a character"),
    (b'{"text": "\xff"}', r":2 is not UTF-8"),
]


@pytest.mark.parametrize(("line", "match"), BROKEN)
def test_a_broken_line_is_named(tmp_path, line, match):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    (chunk,) = read_chunks(path)
    one, error, two = chunk.texts("text")
    assert (one, two) == ("one", "two") and re.search(f"a.jsonl{match}", str(error))


def test_nothing_is_written_of_a_file_with_a_broken_line_unless_it_may_be_left_out(
    folder, tmp_path
):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": 2}\n\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:2 has no text in 'text', but 2.*--skip-broken"):
        preprocess([path], folder, tmp_path / "new" / "data")
    with pytest.raises(ValueError, match=r"a.jsonl:2 has no text in 'text', but 2"):
        train_and_save_tokenizer([path], tmp_path / "own", 300)
    assert list(tmp_path.iterdir()) == [path]
    told = []
    made = preprocess([path], folder, tmp_path / "data", skip_broken=True, tell=told.append)
    assert stored(tmp_path / "data") == expected(folder, ["one", "two"])
    assert made.broken == 1 and len(told) == 1 and "a.jsonl:2 " in told[0]


def test_a_broken_conversation_is_named(folder, tmp_path):
    good = {"messages": conversation(1)}
    empty = [{"messages": []}, {"messages": None}]
    bad = [{"messages": "hello"}, {"messages": conversation(1)[:1]}, {"messages": [1]}]
    bad.append({**good, "chat_template_kwargs": {"tools": []}})
    path = write_lines(tmp_path / "a.jsonl", [good, *bad, *empty])
    with path.open("a") as file:
        deep = "[" * 3000 + "]" * 3000
        file.write(f'{{"messages": {deep}}}\n{{"messages": [], "tools": 1}}\n')
        function = json.dumps({"name": "f", "arguments": deep})
        calls = f'[{{"role": "assistant", "tool_calls": [{{"function": {function}}}]}}]'
        file.write(f'{{"messages": {calls}}}\n')
        asked = json.dumps(conversation(1))
        file.write(f'{{"messages": {asked}, "tools": "{deep}"}}\n')
    told = []
    made = preprocess([path], folder, tmp_path / "d", chat=True, skip_broken=True, tell=told.append)
    assert (made.documents, made.broken, made.empty) == (1, 7, 3)
    assert "a.jsonl:5 has 'tools' in 'chat_template_kwargs': leave it out" in told[3]
    assert "a.jsonl:8 is not JSON: it is nested too deeply" in told[4]
    assert "a.jsonl:10: the arguments of call 0 of message 0" in told[5]
    assert "a.jsonl:11: it is nested too deeply" in told[6]
    assert "a.jsonl:2 has no list in 'messages', but 'hello'" in told[0]
    assert "a.jsonl:3: the conversation has no answer" in told[1]
    assert "a.jsonl:4: message 0 of the chat is of type" in told[2]


def test_files_that_cannot_be_read_are_named(folder, tmp_path):
    def refuse(name, match, error=ValueError):
        with pytest.raises(error, match=match):
            preprocess([tmp_path / name], folder, tmp_path / "data")

    refuse("none.jsonl", r"none.jsonl is not a file")
    (tmp_path / "a.csv").touch()
    refuse("a.csv", r"a.csv has none of the endings .jsonl, .ndjson, .json, .txt")
    (tmp_path / "a.jsonl").touch()
    refuse("a.jsonl", "the input has no documents: nothing is written")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 999)[:-9])
    refuse("b.jsonl.gz", r"b.jsonl.gz cannot be read: Compressed file ended")
    (tmp_path / "c.txt.gz").write_bytes(b"text")
    refuse("c.txt.gz", r"c.txt.gz cannot be read: Not a gzipped file")
    write_lines(tmp_path / "d.jsonl.zst", [{"text": "one"}])
    (tmp_path / "e.jsonl.zst").write_bytes((tmp_path / "d.jsonl.zst").read_bytes()[:-3])
    refuse("e.jsonl.zst", r"e.jsonl.zst cannot be read: Truncated compressed stream")
    save_to_disk(tmp_path / "splits" / "train", [{"text": "one"}] * 9)
    refuse("splits", r"splits is not a file, .* a state.json: name one of its splits train")
    (tmp_path / "splits/train/data-00001-of-00002.arrow").unlink()
    refuse("splits/train", r"data-00001-of-00002.arrow is not a file; name files")
    assert not list(tmp_path.glob("data*"))


@pytest.mark.parametrize("workers", matrix_rows([1, 3], 1))
def test_rows_of_tables_give_the_dataset_of_the_same_lines(folder, tmp_path, workers):
    documents = texts(600)  # more than a chunk
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}
        for text in documents[:20]
    ]
    for name, records, options in (
        ("text", [{"id": i, "story": text} for i, text in enumerate(documents)], {"key": "story"}),
        ("chat", chats, {"chat": True}),
    ):
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / f"{name}.parquet")
        write_lines(tmp_path / f"{name}.jsonl", records)
        save_to_disk(tmp_path / f"{name}.saved", records)
        for ending in ("parquet", "saved", "jsonl"):
            path = tmp_path / f"{name}.{ending}"
            made = preprocess(
                [path], folder, tmp_path / f"{name}_{ending}", workers=workers, **options
            )
            assert made.documents == len(records)
        for ending in ("parquet", "saved"):
            assert stored(tmp_path / f"{name}_{ending}") == stored(tmp_path / f"{name}_jsonl")


def test_tables_have_the_conversations_that_were_put_into_them(folder, tmp_path):
    """Not the JSON text of what differs between records, nor null where others have a field."""
    shutil.copytree(folder, tmp_path / "model")
    template = "{{ name }}{{ tools|tojson }}{% for m in messages %}{{ m|tojson }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    calls = [[{"function": {"name": "f", "arguments": {key: "x"}}}] for key in "ab"]
    chats = [[*conversation(1)[:1], {"role": "assistant", "tool_calls": each}] for each in calls]
    tools, given = [{"function": {"default": None}}], {"name": "Zed"}
    records = [{"messages": m, "tools": tools, "chat_template_kwargs": given} for m in chats]
    texts = {"tools": list(map(json.dumps, tools))}
    table = pyarrow.Table.from_pylist([{**each, **texts} for each in records])
    column = table["tools"].cast(pyarrow.list_(pyarrow.json_()))
    parquet.write_table(table.set_column(1, "tools", column), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", records)
    for ending in ("parquet", "jsonl"):
        preprocess([tmp_path / f"a.{ending}"], tmp_path / "model", tmp_path / ending, chat=True)
    assert stored(tmp_path / "parquet") == stored(tmp_path / "jsonl")
    text = Tokenizer.from_folder(folder).decode(stored(tmp_path / "parquet")[1])
    assert 'Zed[{"function": {"default": null}}]' in text and '{"b": "x"}' in text


def test_lines_of_standard_input_are_documents(folder, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert preprocess(["-"], folder, tmp_path / "data").documents == 2
    assert stored(tmp_path / "data") == expected(folder, ["one", "two"])
    with pytest.raises(ValueError, match="- is not a file"):  # which is read twice
        train_and_save_tokenizer(["-"], tmp_path / "new", 300)


def test_null_and_empty_texts_are_counted_and_left_out_alike_in_all_formats(folder, tmp_path):
    path = tmp_path / "a.parquet"
    documents = ["one", None, "", "three"]
    parquet.write_table(pyarrow.table({"text": documents}), path)
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    (tmp_path / "a.txt").write_text("one\n\n\nthree\n")
    for each in ("a.parquet", "a.jsonl", "a.txt"):
        output = tmp_path / f"data of {each}"
        made = preprocess([tmp_path / each], folder, output, one_per_line=True)
        assert (made.documents, made.empty, made.broken) == (2, 2, 0)
        assert stored(output) == expected(folder, ["one", "three"])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        preprocess([path], folder, tmp_path / "more")


def test_parquet_needs_pyarrow(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ImportError, match=r"parquet, .* need pyarrow: pip install pyarrow"):
        preprocess([tmp_path / "a.parquet"], folder, tmp_path / "data")


@pytest.mark.parametrize(
    ("is_bare", "output", "options", "match"),
    [
        (False, "data", {"workers": 0}, "workers is 0; it must be a whole number from 1"),
        (False, "data", {"chat": True, "append_eod": True}, "the template writes the end tokens"),
        (False, "made", {}, "made.idx exists: remove it, or name another output"),
        (True, "data", {}, "has no end token: give it an eos_token .*--no-append"),
        (True, "data", {"chat": True}, "has no chat template, which --chat needs"),
    ],
)
def test_what_does_not_fit_is_refused(folder, tmp_path, is_bare, output, options, match):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    preprocess([path], folder, tmp_path / "made")
    if is_bare:
        bare = Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
        folder = tmp_path / "bare"
        bare.save(folder)
    with pytest.raises(ValueError, match=match):
        preprocess([path], folder, tmp_path / output, **options)


def preprocess_as_a_command(command: list[str]) -> None:
    multiprocessing.set_start_method(None, force=True)  # as in a process from a shell
    cli.main(command)


def test_what_a_killed_run_left_is_no_dataset_and_gives_way(folder, tmp_path):
    """Killed while it writes; the workers end with it."""
    path = write_lines(tmp_path / "a.jsonl", [{"text": text * 40} for text in texts(2000)])
    command = ["preprocess", str(path), "--tokenizer", str(folder), "--output"]
    command += [str(tmp_path / "data"), "--workers", "1"]
    process = rank_context().Process(target=preprocess_as_a_command, args=(command,))
    process.start()
    part = tmp_path / "data.partial" / ".bin"
    wait_until(lambda: part.exists() and part.stat().st_size)
    workers = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not list(tmp_path.glob("data.*[xn]"))
    with pytest.raises(ValueError, match=r"data.idx does not exist. Run"):
        build_datasets(
            DataFields(8, train=[str(tmp_path / "data")]), Tokenizer.from_folder(folder), (1, 0, 0)
        )
    assert workers
    wait_until(lambda: not any(map(is_running, workers)))
    small = write_lines(tmp_path / "b.jsonl", [{"text": "one"}])
    preprocess([small], folder, tmp_path / "data")
    assert stored(tmp_path / "data") == expected(folder, ["one"])
    assert not (tmp_path / "data.partial").exists()


def test_a_worker_that_dies_is_told(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}])
    with pytest.raises(RuntimeError, match="a worker of preprocess died"):
        list(encode_all(read_chunks(path), (tmp_path / "no folder", "text", False, True), 1))


# The command -------------------------------------------------------------------------------------


def test_the_command_trains_a_tokenizer_and_writes_a_dataset(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", [{"body": text} for text in texts(200)])
    own, output = str(tmp_path / "tokenizer"), str(tmp_path / "data")
    arguments = ["preprocess", str(path), "--tokenizer", own, "--key", "body"]
    status = cli.main(
        [*arguments, "--output", output, "--train-tokenizer", "270", "--workers", "1"]
    )
    out = capsys.readouterr().out
    assert status == 0 and f"wrote {own}: a tokenizer of 270 tokens" in out
    assert f"wrote {output}: 200 documents, " in out and " tokens/s" in out
    assert stored(output) == expected(own, texts(200))
    assert np.memmap(f"{output}.bin", np.uint16).max() < 270
    assert cli.main([*arguments, "--train-tokenizer", "270"]) == 2
    assert "tokenizer.json exists" in capsys.readouterr().err
    assert cli.main(arguments) == 2
    assert "--output PREFIX is missing" in capsys.readouterr().err


def test_the_command_names_what_it_leaves_out(folder, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": 1}\n' + json.dumps({"messages": conversation(3)}))
    arguments = ["preprocess", str(path), "--tokenizer", str(folder), "--workers", "1", "--chat"]
    output = str(tmp_path / "data")
    assert cli.main([*arguments, "--output", output]) == 2
    assert "a.jsonl:1 has no list in 'messages', but 1" in capsys.readouterr().err
    assert cli.main([*arguments, "--output", output, "--skip-broken"]) == 0
    out, err = capsys.readouterr()
    assert "1 documents, " in out and " of answers), 1 broken left out; " in out
    assert "left out: " in err and "a.jsonl:1" in err


def test_a_record_that_would_take_gigabytes_to_encode_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "LARGEST_RECORD", 64)
    (tmp_path / "a.txt").write_text("x" * 65)
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "x" * 999}, {"text": "two"}])
    parquet.write_table(pyarrow.table({"text": ["one", "x" * 65, "two"]}), tmp_path / "a.parquet")
    for name, place in (("a.txt", ":1"), ("a.jsonl", ":2"), ("a.parquet", ", row 2")):
        (chunk,) = document_files.read_chunks(tmp_path / name)
        assert all(not isinstance(each, bytes) or len(each) <= 65 for each in chunk.records)
        *others, error = sorted(chunk.texts("text"), key=lambda each: isinstance(each, Exception))
        assert others == ([] if name == "a.txt" else ["one", "two"])
        assert f"{name}{place} has more than " in str(error) and "--one-per-line" in str(error)


def test_values_that_python_cannot_hold_break_no_field_but_their_own(tmp_path):
    offsets, characters = pyarrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])), b"a\xff"
    texts = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(characters)]
    )
    times = pyarrow.array([253402300800] * 2, pyarrow.timestamp("s"))  # the year 10000
    broken_json = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["{", "1"]))
    table = pyarrow.table({"text": texts, "time": times, "json": broken_json})
    parquet.write_table(table, tmp_path / "a.parquet")
    (chunk,) = read_chunks(tmp_path / "a.parquet")
    found, error = chunk.texts("text")
    assert found == "a" and "row 2 has no text in 'text', but " in str(error)
    assert "utf-8" in str(error) and chunk.records[1]["json"] == 1
