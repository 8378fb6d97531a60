"""Datasets: documents and conversations in rows, blends, splits, files that do not fit; packing."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from index_folders import write_conversations, write_documents, write_index

import megatron_hybrid
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data import index_files
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.data.datasets import build_datasets
from megatron_hybrid.training.data.rows import pack
from megatron_hybrid.utils import files

END = 0


def make_tokenizer(size: int = 100, end: int | None = END) -> Tokenizer:
    vocabulary = {f"t{i}": i for i in range(size)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t1")
    return Tokenizer(tokenizers.Tokenizer(model), eod=end)


TOKENIZER = make_tokenizer()


def documents(count: int, seed: int = 0, base: int = 1) -> list[list[int]]:
    """Documents of 1 to 12 tokens and an end token, all tokens of a document alike."""
    rng = np.random.default_rng(seed)
    return [
        [base + i % 90] * size + [END] for i, size in enumerate(rng.integers(1, 12, size=count))
    ]


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "text", documents(40), TOKENIZER)


def to_train(length, files, count=None, **fields):
    """The part of the datasets to train with, of so many rows or of one epoch."""
    fields = DataFields(length, train=files, **fields)
    train, _, _ = build_datasets(fields, TOKENIZER, (count, 0, 0))
    return train


def rows(dataset):
    return [dataset[i] for i in range(len(dataset))]


def test_rows_are_joined_documents_and_each_is_a_sequence(prefix):
    fields = DataFields(16, train=[prefix])
    train, valid, test = build_datasets(fields, TOKENIZER, (30, 0, 0))
    assert valid is None and test is None and len(train) >= 30
    for row in rows(train):
        assert row.keys() == {"tokens", "labels", "loss_mask", "lengths"}  # no mask of attention
        tokens, labels, mask = row["tokens"], row["labels"], row["loss_mask"]
        assert tokens.dtype == labels.dtype == torch.int64 and mask.dtype == torch.float32
        assert tokens.shape == labels.shape == mask.shape == (16,)
        assert torch.equal(tokens[1:], labels[:-1])
        assert sum(row["lengths"]) == 16 and min(row["lengths"]) > 0
        for piece in tokens.split(row["lengths"]):
            assert len(set(piece[piece != END].tolist())) <= 1  # of one document
            assert END not in piece[:-1]
        assert torch.equal(mask == 0, tokens == END)


def test_a_row_may_be_one_sequence_with_loss_everywhere(prefix):
    fields = {"reset_at_documents": False, "mask_end_of_document_loss": False}
    train = to_train(16, [prefix], 4, **fields)
    assert all(row["lengths"] == [16] and row["loss_mask"].all() for row in rows(train))


def test_an_epoch_has_every_token_once(prefix):
    train = to_train(16, [prefix])
    all_tokens = [token for document in documents(40) for token in document]
    assert len(train) == (len(all_tokens) - 1) // 16
    found = torch.cat([row["tokens"] for row in rows(train)]).bincount(minlength=100)
    rest = torch.tensor(all_tokens).bincount(minlength=100) - found
    assert rest.min() >= 0 and rest.sum() == len(all_tokens) - len(train) * 16


def test_the_order_follows_from_the_seed(prefix):
    def first_rows(**fields):
        train = to_train(16, [prefix], 9, **fields)
        return torch.stack([train[i]["tokens"] for i in range(9)])

    assert torch.equal(first_rows(), first_rows())
    assert not torch.equal(first_rows(), first_rows(seed=7))


def test_split_gives_each_part_its_own_documents(prefix):
    fields = DataFields(8, blend=[prefix], split="50,25,25", reset_at_documents=False)
    parts = build_datasets(fields, TOKENIZER, (None, None, None))
    seen = [{token for row in rows(part) for token in row["tokens"].tolist()} for part in parts]
    expected = [set(range(1, 21)), set(range(21, 31)), set(range(31, 41))]
    assert [tokens - {END} for tokens in seen] == expected


def test_blends_draw_in_proportion_to_the_weights_or_to_the_tokens(tmp_path):
    small = write_documents(tmp_path / "small", [[1] * 15 + [END]] * 20, TOKENIZER)
    large = write_documents(tmp_path / "large", [[2] * 15 + [END]] * 60, TOKENIZER)

    def share(blend):
        train = to_train(16, blend, 400)
        assert len(train) >= 400
        return sum(1 in train[i]["tokens"] for i in range(400)) / 400

    assert share([[3, small], [1, large]]) == pytest.approx(0.75, abs=0.01)
    assert share([small, large]) == pytest.approx(0.25, abs=0.01)  # in several epochs


def test_the_packaged_tokenizer_serves_core_without_a_warning(tmp_path, recwarn):
    tokenizer = Tokenizer.from_folder(Path(megatron_hybrid.__file__).parent / "demo_model")
    text = [tokenizer.tokenize("Once upon a time there was"), tokenizer.tokenize("a fox")]
    path = write_documents(tmp_path / "d", [[*t, tokenizer.eod] for t in text], tokenizer)
    train, _, _ = build_datasets(DataFields(4, train=[path]), tokenizer, (3, 0, 0))
    assert len(rows(train)) >= 3
    assert not [warning for warning in recwarn if "pad" in str(warning.message)]


# Conversations -----------------------------------------------------------------------------------


def conversations(count: int, longest: int = 20) -> tuple[list, list]:
    """Conversations of distinct numbers of tokens; the answers are the tokens from 50 on."""
    rng = np.random.default_rng(1)
    tokens, answers = [], []
    for i in range(count):
        asked, answered = rng.integers(1, longest // 2, size=2)
        turn = [1 + i % 49] * asked + [50 + i % 49] * answered
        tokens.append(turn * 2)
        n = len(turn)
        answers.append([(asked, n), (n + asked, 2 * n, 0.5)])
    return tokens, answers


@pytest.fixture
def chats(tmp_path):
    return write_conversations(tmp_path / "chats", *conversations(60), TOKENIZER)


def sequences(row):
    sizes = row["lengths"]
    return zip(*(row[name].split(sizes) for name in ("tokens", "labels", "loss_mask")))


def test_conversations_are_whole_and_only_answers_count(chats):
    train = to_train(64, [chats], kind="sft")
    found, padding = [], 0
    for row in rows(train):
        assert sum(row["lengths"]) == 64
        for tokens, labels, mask in sequences(row):
            if tokens.max() <= 0:
                assert not mask.any()
                padding += len(tokens)
                continue
            assert torch.equal(tokens[1:], labels[:-1])
            last_turn = torch.arange(len(labels)) >= len(labels) // 2
            assert torch.equal(mask, (labels >= 50) * torch.where(last_turn, 0.5, 1.0))
            found.append([*tokens.tolist(), int(labels[-1])])
    assert sorted(found) == sorted(conversations(60)[0])
    assert padding < 0.1 * 64 * len(train)


def test_epochs_pack_anew_and_the_seed_decides(chats):
    def packed(**fields):
        train = to_train(64, [chats], 100, kind="sft", **fields)
        return torch.stack([row["tokens"] for row in rows(train)])

    once, again = packed(), packed()
    assert torch.equal(once, again) and len(once) >= 100
    n = len(to_train(64, [chats], kind="sft"))  # of one epoch
    assert not torch.equal(once[:n], once[n : 2 * n])
    assert once[:n].sum() == once[n : 2 * n].sum()
    assert not torch.equal(once, packed(seed=8))


def test_long_conversations_are_cut_and_counted(tmp_path, caplog):
    tokens, answers = conversations(30)
    tokens.append([3] * 40 + [60] * 60)
    answers.append([(40, 100)])
    path = write_conversations(tmp_path / "long", tokens, answers, TOKENIZER)
    train = to_train(48, [path], 200, kind="sft")
    assert train.num_truncated == 1
    assert [r.getMessage() for r in caplog.records if "cut off" in r.getMessage()] == [
        f"{path}: 1 of 31 conversations are cut off after 48 tokens, the sequence_length."
    ]
    (row,) = [row for row in rows(train)[: len(train) // 9] if row["lengths"] == [48]][:1]
    assert row["loss_mask"].sum() == 9 and row["labels"][-1] == 60


def test_conversations_without_a_label_in_a_row_are_left_out_and_a_set_of_them_is_refused(
    tmp_path, caplog
):
    conversations = [list(range(10, 50)), list(range(10, 16))]
    prefix = write_conversations(tmp_path / "a", conversations, [[(30, 40)], [(0, 3)]], TOKENIZER)
    train = to_train(16, [prefix], kind="sft")
    assert len(train) == 1 and train[0]["loss_mask"].tolist() == [1, 1] + [0] * 14
    assert "1 of 2 conversations are left out" in caplog.text
    prefix = write_conversations(tmp_path / "b", conversations, [[(30, 40)], [(0, 1)]], TOKENIZER)
    with pytest.raises(ValueError, match="an answer to train in their first 16 tokens"):
        to_train(16, [prefix], kind="sft")


def test_a_bin_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    prefix = write_documents(tmp_path / "a", [[30, END]] * 5000, TOKENIZER)
    train = to_train(16, [prefix])
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(ValueError, match=r"a\.bin was cut while it is read"):
        [train[i] for i in range(9)]


def test_a_large_file_is_known_by_samples_of_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_READ_WHOLE", 640)
    found = set()
    for place in (None, 0, 4999):
        texts = [[30 + (i == place), END] for i in range(5000)]
        found.add(index_files.content_of(write_documents(tmp_path / "a", texts, TOKENIZER)))
    assert len(found) == 3


def test_conversations_blend(tmp_path, chats):
    other = write_conversations(tmp_path / "other", [[1, 99, 99]] * 50, [[(1, 3)]] * 50, TOKENIZER)
    train = to_train(64, [[1, chats], [1, other]], 40, kind="sft")
    assert sum(99 in train[i]["tokens"] for i in range(40)) == 20


# Files and fields that do not fit ----------------------------------------------------------------


def refuse(match: str, prefix, tokenizer=TOKENIZER, samples=(4, 0, 0), **fields):
    fields = {"train": [str(prefix)], **fields}
    with pytest.raises(ValueError, match=match):
        build_datasets(DataFields(16, **fields), tokenizer, samples)


def test_missing_files_are_named(prefix, tmp_path):
    refuse(r"nothing.idx does not exist. Run `megatron-hybrid preprocess", tmp_path / "nothing")
    os.remove(f"{prefix}.idx")
    refuse(r"text.idx does not exist, though .*text.bin does: the dataset is not whole", prefix)
    shutil.move(f"{prefix}.bin", f"{prefix}.idx")
    refuse(r"text.bin does not exist, though .*text.idx does", prefix)


@pytest.mark.parametrize(
    ("suffix", "size", "match"),
    [
        (".bin", -2, r"text.bin has \d+ bytes, \d+ belong to the \d+ tokens of .*text.idx"),
        (".bin", 0, r"text.bin has 0 bytes"),
        (
            ".idx",
            -1,
            "text.idx is not a whole index of a dataset: buffer is smaller .* Remove it,",
        ),
        (".idx", 0, "text.idx is not a whole index of a dataset: bad header"),
        (".json", -5, "text.json does not describe a dataset"),
    ],
)
def test_torn_files_are_named(prefix, suffix, size, match):
    path = prefix + suffix
    os.truncate(path, size if size >= 0 else os.path.getsize(path) + size)
    refuse(match, prefix)


def test_datasets_of_another_input_tokenizer_or_run_are_refused(prefix, tmp_path):
    write_index(tmp_path / "empty", [])
    refuse("empty has no tokens: its input was empty", tmp_path / "empty")
    refuse("text was made with another tokenizer: .*text.json has", prefix, make_tokenizer(101))
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "documents": 41}))
    refuse("counts 41 documents and .* has 40 and .*: they are of different runs", prefix)


def test_without_a_description_tokens_outside_of_the_vocabulary_are_refused(prefix):
    os.remove(f"{prefix}.json")
    train, _, _ = build_datasets(DataFields(16, train=[prefix]), make_tokenizer(20), (30, 0, 0))
    with pytest.raises(ValueError, match=r"text has token \d+, the tokenizer has 20: it was made"):
        rows(train)


def test_documents_without_end_tokens_are_one_sequence_or_refused(tmp_path):
    path = write_documents(tmp_path / "endless", [[5] * 30] * 9, TOKENIZER)
    refuse("first document of .*endless ends with token 5, .*end-of-document token 0", path)
    fields = DataFields(16, train=[path], reset_at_documents=False)
    assert build_datasets(fields, TOKENIZER, (4, 0, 0))[0][0]["lengths"] == [16]
    os.remove(f"{path}.json")
    refuse("the tokenizer has no end-of-document token", path, make_tokenizer(end=None))


def test_kinds_are_not_mixed_up(prefix, chats):
    refuse("made for pretraining, not for sft: make it anew with --chat", prefix, kind="sft")
    refuse("chats was made for sft, not for pretraining: make it anew without --chat", chats)
    (Path(f"{chats}.json")).rename(f"{chats}.moved")
    refuse("chats.json is missing", chats, kind="sft")
    (Path(f"{chats}.moved")).rename(f"{chats}.json")
    os.remove(f"{chats}.spans.idx")
    refuse(r"chats.spans.idx does not exist, though .*--output .*/chats`", chats, kind="sft")


def test_a_part_without_documents_is_refused_not_waited_for(tmp_path):
    path = write_documents(tmp_path / "few", documents(3), TOKENIZER)
    refuse("there is no valid data: name datasets in valid", path, samples=(4, 4, 0))
    wanted = {"train": [], "blend": [path], "samples": (4, 4, 0)}
    refuse("few has 3 documents, of which split '969,30,1' gives none .* to valid", path, **wanted)
    refuse("split is '1,0,0', which leaves nothing for valid", path, **wanted, split="1,0,0")
    fields = DataFields(16, blend=[path])
    train, valid, _ = build_datasets(fields, TOKENIZER, (4, 0, 0))
    assert len(train) >= 4 and valid is None


def test_a_dataset_made_anew_has_an_order_of_its_own(tmp_path):
    def tokens(folder, count):
        path = write_documents(tmp_path / folder, documents(count), TOKENIZER)
        train = to_train(16, [path], 30)
        return torch.stack([train[i]["tokens"] for i in range(30)])

    tokens("again", 40)
    for count in (80, 10):  # documents that the order of 40 lacks, or has and are gone
        assert torch.equal(tokens("again", count), tokens(f"new {count}", count))


@pytest.mark.parametrize("cache_path", [None, "cache"])
def test_a_torn_cache_or_one_that_cannot_be_written_is_named(prefix, tmp_path, cache_path):
    file = tmp_path / "file"
    file.touch()
    refuse(f"{file} cannot be written: set cache_path", prefix, cache_path=file)
    cache = tmp_path / cache_path if cache_path else None
    fields = DataFields(16, train=[prefix], cache_path=cache)
    build_datasets(fields, TOKENIZER, (30, 0, 0))
    (path,) = tmp_path.rglob("*shuffle_index.npy")
    os.truncate(path, path.stat().st_size - 1)
    refuse(f"{path} is torn, .*: remove it, it is made anew", prefix, cache_path=cache)
    path.unlink()
    build_datasets(fields, TOKENIZER, (30, 0, 0))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"train": []}, "give either blend .*; got none"),
        ({"blend": ["b"]}, r"got \['train'\] next to blend"),
        ({"train": [[0, "a"]]}, "train: a weight is 0; it must be a number above 0"),
        ({"train": [[1, "a"], "b"]}, "train has weights for 1 of 2 datasets; give all or none"),
        ({"train": [3]}, r"train has the entry 3; use a prefix, or \[weight, prefix\]"),
        ({"split": "9;1"}, "split is '9;1'; use three numbers"),
        ({"split": "0,0,0"}, "split is '0,0,0'; one part at least"),
        ({"sequence_length_warmup": [[9, 8]]}, "fewer tokens than sequence_length 8"),
        ({"sequence_length_warmup": [[9, 2], [5, 4]]}, "a list of pairs .* that rise"),
        ({"sequence_length_warmup": [3, 4]}, r"length_warmup\[0\] is 3; it must be a list"),
    ],
)
def test_fields_are_checked(fields, match):
    with pytest.raises(ValueError, match=match):
        DataFields(**{"sequence_length": 8, "train": ["a"], **fields}).check()


def test_sequences_grow_with_the_steps():
    fields = DataFields(2048, train=["a"], sequence_length_warmup=[[10, 64], [1885, 512]])
    fields.check()
    found = [fields.longest_sequence(step) for step in (0, 9, 10, 1884, 1885, 9999)]
    assert found == [64, 64, 512, 512, 2048, 2048]


def packed(lengths, capacity, seed=0):
    return [row.tolist() for row in pack(np.array(lengths), capacity, np.random.RandomState(seed))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("longest", "capacity"), [(3, 64), (30, 64), (64, 64), (1, 1)])
def test_rows_hold_every_sequence_once_and_little_else(seed, longest, capacity):
    lengths = np.random.default_rng(seed).integers(1, longest + 1, 500)
    rows = packed(lengths, capacity, seed)
    sizes = [lengths[row].sum() for row in rows]
    assert sorted(i for row in rows for i in row) == list(range(500)) and max(sizes) <= capacity
    # No two rows fit in one, so on average they are more than half full; short ones do better.
    assert sum(sorted(sizes)[:2]) > capacity
    assert (
        len(rows) <= np.ceil(lengths.sum() / capacity) * (1.02 if longest < capacity else 1.1) + 1
    )


def test_the_best_fit_is_found():
    assert packed([], 8) == []
    assert sorted(map(len, packed([6, 5, 4, 3, 2, 1, 7], 7))) == [1, 2, 2, 2]


def test_equal_sequences_change_company_with_the_seed():
    lengths = [8] * 40 + [4] * 40
    assert packed(lengths, 16, 1) == packed(lengths, 16, 1) != packed(lengths, 16, 2)
    company = {frozenset(row) for row in packed(lengths, 16, 1)}
    assert company != {frozenset(row) for row in packed(lengths, 16, 2)}
