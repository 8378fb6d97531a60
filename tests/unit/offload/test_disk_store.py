"""A cache folder after kills, flipped bytes and mistakes: what is used is right, the rest named."""

import dataclasses
import gc
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from forks import in_fork
from matrix import matrix_rows
from waiting import LIMIT_S

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.offload import disk_index, disk_store
from megatron_hybrid.offload.disk_index import FORMAT, DiskIndex
from megatron_hybrid.offload.disk_store import CacheFolderError, DiskStore
from megatron_hybrid.offload.offload import disk_tier
from megatron_hybrid.offload.page_file import PageFile
from megatron_hybrid.offload.page_mover import HostPages
from megatron_hybrid.offload.prefix_keys import PrefixKeys
from megatron_hybrid.offload.tier import state_record_pages

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=3000, hidden_bytes=64)
PAGE = SPEC.page_bytes
MADE_FOR = {"weights": "w", "state_encoding": "exact"}
PROMPT = 40  # tokens: two blocks, and a state with a partial one
PROMPT_BYTES = (2 * SPEC.kv_pages_per_block + state_record_pages(SPEC, PROMPT)) * PAGE


def pages_of(name: str, count: int) -> HostPages:
    """Bytes that only this name has."""
    seed = int.from_bytes(name.encode(), "little") % 2**63
    data = np.random.default_rng(seed).integers(0, 256, (count, PAGE), dtype=np.uint8)
    return HostPages(torch.from_numpy(data))


class Prompt:
    """Prompt number i, and what it leaves behind."""

    def __init__(self, i: int):
        self.i = i
        self.keys = PrefixKeys(np.full(PROMPT, i, dtype=np.int32), "", 16)

    def bytes_of(self, parts):
        """Of blocks 0 and 1, and of the state as number 2."""
        sizes = [SPEC.kv_pages_per_block] * 2 + [state_record_pages(SPEC, PROMPT)]
        return [pages_of(f"{self.i} {part}", sizes[part]) for part in parts]

    def keep_in(self, tier) -> bool:
        return tier.keep(
            self.keys.blocks(2),
            self.bytes_of,
            state=self.keys.state(PROMPT),
            position=PROMPT,
            saved_work=PROMPT,
        )

    def read_from(self, tier) -> list[HostPages | None] | None:
        """Its records' bytes; None if it is not found."""
        record = tier.find(self.keys)
        if record is None:
            return None
        return [tier.store.get(each).result() for each in [*record.chain(), record]]

    def is_right_in(self, tier) -> bool:
        """Whether all of it is there and as it was; anything else must be missing or refused."""
        read = self.read_from(tier)
        if read is None or None in read:
            return False
        expected = self.bytes_of([0, 1, 2])
        assert all(torch.equal(a.data, b.data) for a, b in zip(read, expected, strict=True))
        return True


OPENED = []
"""Tiers of a test, which are closed after it."""


@pytest.fixture(autouse=True)
def all_is_closed():
    yield
    while OPENED:
        OPENED.pop().store.close()


def open_tier(folder, capacity=1 << 30, made_for=MADE_FOR):
    OPENED.append(disk_tier(DiskStore(folder, PAGE, made_for), SPEC, capacity))
    return OPENED[-1]


def open_again(folder, **options):
    """Once what was opened last is closed."""
    OPENED[-1].store.close()
    return open_tier(folder, **options)


@pytest.fixture
def filled(tmp_path):
    """A folder with ten prompts."""
    tier = open_tier(tmp_path / "cache")
    assert all(Prompt(i).keep_in(tier) for i in range(10))
    tier.store.close()
    return tmp_path / "cache"


@pytest.fixture
def tier(filled):
    """The tier of that folder."""
    return open_tier(filled)


def test_what_was_written_is_there_after_a_restart(tier, filled):
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    assert not Prompt(10).is_right_in(tier)
    assert not tier.store.problems
    assert Prompt(10).keep_in(tier)
    assert Prompt(10).is_right_in(tier)  # also while it is on its way
    tier = open_again(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(11))


def test_the_file_is_cut_to_a_smaller_limit(filled, monkeypatch):
    page_file = filled / "pages.bin"
    assert page_file.stat().st_size == 10 * PROMPT_BYTES
    tier = open_tier(filled, capacity=5 * PROMPT_BYTES)
    assert page_file.stat().st_size <= 5 * PROMPT_BYTES
    right = [i for i in range(10) if Prompt(i).is_right_in(tier)]
    assert len(right) == 5
    tier.store.close()
    monkeypatch.setattr(os, "ftruncate", lambda *arguments: None)  # dies after the moves
    open_tier(filled, capacity=3 * PROMPT_BYTES).store.close()
    monkeypatch.undo()
    tier = open_tier(filled, capacity=3 * PROMPT_BYTES)
    assert page_file.stat().st_size <= 3 * PROMPT_BYTES
    kept = [i for i in range(10) if Prompt(i).is_right_in(tier)]
    assert len(kept) == 3 and set(kept) < set(right)
    assert not tier.store.problems
    tier.clear()
    tier.store.rebind(OTHER_WEIGHTS)
    assert not page_file.stat().st_size
    assert Prompt(7).keep_in(tier)
    tier.store.flush()
    assert Prompt(7).is_right_in(tier)


def write_for_ever(folder, capacity, told):
    """Write the number of each prompt that is flushed to the file `told`."""
    tier = open_tier(folder, capacity)
    for i in range(100_000):
        while not tier.store.accepts():
            pass
        Prompt(i).keep_in(tier)
        if i % 20 == 0:
            tier.store.flush()
            os.write(told, f"{i}\n".encode())


@pytest.mark.parametrize(
    ("kill_after", "crowded"),
    matrix_rows([(0.0, False), (0.013, True), (0.05, True)], (0.013, True)),
)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_kill_minus_9_loses_at_most_what_was_on_its_way(tmp_path, kill_after, crowded):
    folder, capacity = tmp_path / "cache", (300 << 10 if crowded else 1 << 30)
    read, told = os.pipe()
    if (writer := os.fork()) == 0:
        try:
            write_for_ever(folder, capacity, told)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(read) as lines:
        flushed = [int(lines.readline()) for _ in range(4)]
        time.sleep(kill_after)
        os.kill(writer, signal.SIGKILL)
        flushed += [int(line) for line in lines]
    os.waitpid(writer, 0)
    tier = open_tier(folder, capacity)
    right = [i for i in range(flushed[-1] + 400) if Prompt(i).is_right_in(tier)]
    assert flushed[-1] in right
    if not crowded:
        assert right[: flushed[-1] + 1] == list(range(flushed[-1] + 1))
    assert not tier.store.problems  # every page of every record is as it was
    assert Prompt(10**6).keep_in(tier)


@pytest.mark.parametrize("name", ["pages.bin", "index.sqlite3"])
def test_any_flipped_bit_is_a_miss_that_is_named(filled, tmp_path, name):
    random = np.random.default_rng(0)
    named = 0
    for trial in range(20):
        copy = tmp_path / str(trial)
        shutil.copytree(filled, copy)
        content = bytearray((copy / name).read_bytes())
        content[random.choice(np.flatnonzero(content))] ^= 1 << int(random.integers(8))
        (copy / name).write_bytes(content)
        try:
            tier = open_tier(copy)
        except CacheFolderError as error:
            assert name == "index.sqlite3" in str(error)
            named += 1
            continue
        right = [Prompt(i).is_right_in(tier) for i in range(10)]
        if not all(right):
            if name == "pages.bin":
                assert sum(right) == 9 and name in tier.store.problems[0]
            named += bool(tier.store.problems)
        tier.store.close()
    assert named > (10 if name == "pages.bin" else 5)  # unused parts may change unseen


@pytest.mark.parametrize("name", ["pages.bin", "index.sqlite3"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_file_that_was_cut_off(filled, name, share):
    path = filled / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    tier = open_tier(filled)
    right = sum(Prompt(i).is_right_in(tier) for i in range(10))
    if name == "pages.bin":
        assert int(share * 10) - 1 <= right < 10
        assert "records are not used, their pages are lost" in tier.store.problems[0]
    else:
        assert not right
        assert not share or "damaged, so its records are lost" in tier.store.problems[0]
    assert Prompt(11).keep_in(tier)
    tier = open_again(filled)
    assert Prompt(11).is_right_in(tier) and not tier.store.problems


# Folders that are not ours ---------------------------------------------------------------------


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_refused(folder, message, **options):
    """It is not opened, and stays as it is."""
    before = listing(folder)
    with pytest.raises(CacheFolderError, match=message):
        open_tier(folder, **options)
    assert listing(folder) == before


@pytest.mark.parametrize(
    ("made_for", "message"),
    [
        ({**MADE_FOR, "weights": "other"}, "for another weights: 'w' there, 'other' here"),
        ({**MADE_FOR, "state_encoding": "int8"}, "for another state encoding: 'exact' there"),
        ({**MADE_FOR, "adapters": "none"}, "for another adapters: None there"),
    ],
)
def test_a_folder_for_another_model_or_configuration_is_refused(filled, made_for, message):
    check_refused(filled, rf"{filled}/index\.sqlite3.* {message}", made_for=made_for)


def test_a_python_without_sqlite3_has_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_index, "sqlite3", None)
    with pytest.raises(CacheFolderError, match="leave out cache_dir"):
        open_tier(tmp_path)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    check_refused(tmp_path, r"holds 'thesis.tex' and no index\.sqlite3")
    (tmp_path / "thesis.tex").rename(tmp_path / "pages.bin")
    (tmp_path / "cache.json").touch()
    check_refused(tmp_path, r"holds 'cache.json' .*: an older version wrote it")
    with pytest.raises(CacheFolderError, match="cannot be used as a cache folder"):
        open_tier(tmp_path / "pages.bin")


@pytest.mark.parametrize("has_pages", [True, False])
def test_a_file_that_is_no_index_is_refused(filled, has_pages):
    (filled / "index.sqlite3").write_bytes(b"years of work " * 100)
    if not has_pages:
        (filled / "pages.bin").unlink()
    check_refused(filled, r"file is not a database.*index\.sqlite3")


@pytest.mark.parametrize("version", [0, FORMAT - 1, FORMAT + 1])
def test_an_index_of_another_version_is_refused(filled, version):
    """Version 0: somebody else's database."""
    index = sqlite3.connect(filled / "index.sqlite3")
    index.executescript(f"PRAGMA journal_mode = DELETE; PRAGMA user_version = {version}")
    index.close()
    message = f"format: {version} there, {FORMAT} here; use another folder, or remove {filled}"
    check_refused(filled, message)


OTHER_WEIGHTS = {**MADE_FOR, "weights": "new"}


def test_what_other_weights_made_never_fits(filled):
    """Whatever the index says: not after a clear, nor under a head that is not theirs."""
    old = (filled / "index.sqlite3").read_bytes()
    tier = open_tier(filled)
    tier.clear()
    tier.store.rebind(OTHER_WEIGHTS)
    tier = open_again(filled, made_for=OTHER_WEIGHTS)
    assert not tier.num_records
    tier.store.close()
    (filled / "index.sqlite3").write_bytes(old)
    index = sqlite3.connect(filled / "index.sqlite3")
    index.execute("UPDATE head SET value = 'new' WHERE name = 'weights'")
    index.commit()
    index.close()
    tier = open_tier(filled, made_for=OTHER_WEIGHTS)
    assert not any(Prompt(i).is_right_in(tier) for i in range(10))


def test_bytes_of_one_record_do_not_fit_another(tier):
    first, second = (tier.find(Prompt(i).keys) for i in (0, 1))
    placed = tier.store._placed
    placed[first.key] = dataclasses.replace(placed[second.key], record=first)
    assert tier.store.get(first).result() is None


def test_what_cannot_be_told_of_the_new_weights_is_not_written(tier, filled, monkeypatch):
    tier.clear()
    full_index(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        tier.store.rebind(OTHER_WEIGHTS)
    assert not Prompt(3).keep_in(tier)
    tier.store.close()
    monkeypatch.undo()
    tier = open_tier(filled)  # still for the old ones, and empty
    assert not tier.find(Prompt(3).keys)


@pytest.mark.parametrize("by_another", [False, True])
def test_a_folder_that_was_removed_is_told(tier, filled, by_another):
    shutil.rmtree(filled)
    if by_another:
        other = open_tier(filled, made_for=OTHER_WEIGHTS)
        assert Prompt(1).keep_in(other)
        other.store.flush()
        before = listing(filled)
    assert Prompt(10).keep_in(tier)
    for fails in (tier.store.recover, tier.store.flush):
        with pytest.raises(OSError, match=r"pages\.bin was removed or replaced.*close the engine"):
            fails()
    with pytest.raises(OSError, match=r"pages\.bin was removed or replaced"):
        tier.store.rebind({**MADE_FOR, "weights": "third"})
    if by_another:
        assert listing(filled) == before
        other.store.close()


def test_two_engines_do_not_share_a_folder(tier, filled):
    (filled / "index.sqlite3").read_bytes()  # closing a file ends the process's locks of sqlite
    message = f"in use by another engine, process {os.getpid()}, or"
    with pytest.raises(CacheFolderError, match=message):
        open_tier(filled)
    open_again(filled)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_leaves_the_folder_alone(tier, filled):
    record = tier.find(Prompt(1).keys)

    def check():
        for use in (
            tier.store.accepts,
            tier.store.flush,
            tier.store.recover,
            lambda: tier.store.get(record),
            lambda: tier.store.drop(record),
            lambda: tier.store.put(record, None),
            lambda: tier.store.rebind(MADE_FOR),
        ):
            with pytest.raises(RuntimeError, match=r"is a fork: make an engine of its own"):
                use()
        tier.store.close()
        tier.store.close()
        tier.store.__dict__.clear()
        gc.collect()  # as at the end of a program

    assert in_fork(check) == 0
    with pytest.raises(CacheFolderError, match="in use by another engine"):
        open_tier(filled)
    assert Prompt(1).is_right_in(tier)
    assert Prompt(10).keep_in(tier)
    tier.store.flush()
    shutil.copytree(filled, filled.parent / "killed")  # as a kill leaves it
    tier.store.close()
    for folder in (filled, filled.parent / "killed"):
        tier = open_tier(folder)
        assert Prompt(10).is_right_in(tier)
        tier.store.close()


@pytest.mark.parametrize("part", [DiskIndex, PageFile])
def test_a_close_that_was_interrupted_is_completed_by_the_next(tier, filled, monkeypatch, part):
    with monkeypatch.context() as patch:
        patch.setattr(part, "close", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tier.store.close()
    tier.store.close()
    assert Prompt(1).is_right_in(open_tier(filled))


def test_a_store_is_closed_by_its_own_threads(tier, filled):
    """The garbage collector runs in whichever thread it likes."""
    tier.store._readers.submit(tier.store.close_from_anywhere).result(10)
    for thread in threading.enumerate():
        if thread.name == "cache-close":
            thread.join(LIMIT_S)
    open_tier(filled)


def test_the_files_are_for_their_owner(filled):
    assert {path.stat().st_mode & 0o777 for path in filled.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["index.sqlite3", "pages.bin", "index.sqlite3-wal"])
@pytest.mark.parametrize("what", ["a folder", "a link", "a link to nothing"])
def test_what_is_in_the_place_of_a_file_is_refused(filled, tmp_path, name, what):
    thesis, place = tmp_path / "thesis.tex", filled / name
    if what == "a link":
        thesis.write_text("years of work")
    place.unlink(missing_ok=True)
    place.mkdir() if what == "a folder" else place.symlink_to(thesis)
    told = "no file" if what == "a folder" else "a link"
    with pytest.raises(CacheFolderError, match=f"{name} is {told}"):
        open_tier(filled)
    assert thesis.exists() == (what == "a link")
    assert not thesis.exists() or thesis.read_text() == "years of work"


def test_the_folder_may_be_a_link(filled, tmp_path):
    (tmp_path / "link").symlink_to(filled)
    tier = open_tier(tmp_path / "link")
    assert Prompt(3).is_right_in(tier)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(5, "Input/output error"), r"index\.sqlite3 cannot be read .* remove"),
        (ZeroDivisionError("a mistake"), "a mistake"),
    ],
)
def test_a_folder_that_could_not_be_loaded_can_be_opened_again(filled, monkeypatch, error, told):
    monkeypatch.setattr(DiskIndex, "read", Mock(side_effect=error))
    with pytest.raises((CacheFolderError, ZeroDivisionError), match=told):
        open_tier(filled)
    monkeypatch.undo()
    open_tier(filled)


# A disk without space ----------------------------------------------------------------------------


def no_space():
    return Mock(side_effect=OSError(28, "No space left on device"))


def full_index(monkeypatch):
    """No room for a transaction, until `undo`."""
    monkeypatch.setattr(DiskIndex, "write", no_space())


@pytest.fixture
def full(monkeypatch):
    """A disk without space, until `undo`."""

    def fill():
        monkeypatch.setattr(os, "pwrite", no_space())
        full_index(monkeypatch)
        return monkeypatch

    return fill


def test_a_full_disk_can_be_read(filled, full):
    patch = full()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    tier.remove(tier.find(Prompt(3).keys))
    with pytest.raises(OSError, match="No space left"):
        tier.store.flush()
    assert "No space left" in tier.store.problems[0]
    assert not Prompt(10).keep_in(tier)
    tier.store.close()
    patch.undo()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))  # the drop could not be noted
    assert not tier.store.problems


def test_a_new_folder_on_a_full_disk_is_refused(tmp_path, monkeypatch):
    schema = f"PRAGMA max_page_count = 1; {disk_index._SCHEMA}"
    monkeypatch.setattr(disk_index, "_SCHEMA", schema)
    with pytest.raises(CacheFolderError, match=r"disk is full.* disk with free space"):
        open_tier(tmp_path / "cache")
    monkeypatch.undo()
    open_tier(tmp_path / "cache")


@pytest.mark.parametrize("by", ["time", "recover"])
def test_a_disk_with_space_again_is_written_again(tier, filled, full, monkeypatch, by):
    index = (filled / "index.sqlite3").read_bytes()
    patch = full()
    assert Prompt(10).keep_in(tier)
    for write in (tier.store.flush, tier.store.recover):
        with pytest.raises(OSError, match=f"writing to {filled} failed: .* No space left"):
            write()
    unwritten = tier.store.take_lost()
    assert len(unwritten) == 3 == tier.store.num_unwritten
    for record in unwritten:
        tier.remove(record)
    tier.remove(tier.find(Prompt(3).keys))
    patch.undo()
    # A crash now would find what was there before.
    with pytest.raises(OSError, match=f"writing to {filled} failed: .* No space left"):
        tier.store.flush()
    assert (filled / "index.sqlite3").read_bytes() == index
    assert not (filled / "index.sqlite3-wal").stat().st_size
    if by == "recover":
        tier.store.recover()
    else:
        later = time.monotonic() + disk_store.RETRY_SECONDS
        monkeypatch.setattr(disk_store.time, "monotonic", lambda: later)
    assert Prompt(10).keep_in(tier) and Prompt(11).keep_in(tier)
    tier.store.recover()
    tier.store.flush()
    tier = open_again(filled)
    assert [i for i in range(12) if Prompt(i).is_right_in(tier)] == [0, 1, 2, *range(4, 12)]
    assert not tier.store.problems


def test_what_sqlite_says_of_a_full_disk_is_told_as_such(tier, filled):
    """And the transaction left nothing behind."""
    index = tier.store._index
    index._connection.execute("PRAGMA max_page_count = 1")  # its present size
    record = tier.find(Prompt(1).keys)
    placed = tier.store._placed[record.key]
    large = dataclasses.replace(placed, number=10**6, slots=np.zeros(10_000, dtype=np.int64))
    with pytest.raises(OSError, match=r"database or disk is full.*index\.sqlite3") as error:
        index.write([placed.number], [large])
    assert error.value.errno == 28
    index._connection.execute("PRAGMA max_page_count = 1000000")
    assert Prompt(10).keep_in(tier)
    tier = open_again(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(11))


@pytest.fixture
def small_disk(monkeypatch):
    """Gives the files of a folder so many bytes together."""
    pwrite, write = os.pwrite, DiskIndex.write

    def make(folder, size):
        has_room = False

        def free():
            return max(0, size - sum(path.stat().st_size for path in folder.iterdir()))

        def small_pwrite(descriptor, data, offset):
            count = len(data) - max(0, offset + len(data) - os.fstat(descriptor).st_size - free())
            if count <= 0:
                raise OSError(28, "No space left on device")
            return pwrite(descriptor, data[:count], offset)

        def small_write(self, dropped, added, head=None):
            nonlocal has_room
            if not free() and not has_room:
                raise OSError(28, "database or disk is full")
            has_room |= head is not None  # then sqlite's log begins anew in its own file
            write(self, dropped, added, head)

        monkeypatch.setattr(os, "pwrite", small_pwrite)
        monkeypatch.setattr(DiskIndex, "write", small_write)
        monkeypatch.setattr(disk_store, "RETRY_SECONDS", 0.0)
        monkeypatch.setattr(disk_store, "SPARE_BYTES", 1000)

    return make


def forget_unwritten(tier):
    with suppress(OSError):
        tier.store.flush()
    for record in tier.store.take_lost():
        tier.remove(record)


def test_what_found_no_room_makes_room_for_the_index(tmp_path, small_disk):
    """Its pages are cut off before the index is written."""
    tier = open_tier(tmp_path)
    small_disk(tmp_path, 150_000)
    for i in range(40):
        assert Prompt(i).keep_in(tier)
        forget_unwritten(tier)
        if tier.store.was_full():
            break
    before = [j for j in range(i + 1) if Prompt(j).is_right_in(tier)]
    assert before and i not in before
    tier.capacity_bytes = tier.used_bytes
    assert Prompt(100).keep_in(tier)  # in the place of another one
    forget_unwritten(tier)
    assert not tier.store.was_full()
    assert Prompt(100).is_right_in(tier)
    tier = open_again(tmp_path)
    right = [j for j in range(i + 1) if Prompt(j).is_right_in(tier)]
    assert len(right) == len(before) - 1 and Prompt(100).is_right_in(tier)
    assert not tier.store.problems


def test_where_there_is_no_room_for_the_index_the_last_records_make_it(tier, filled, small_disk):
    size = sum(path.stat().st_size for path in filled.iterdir())
    small_disk(filled, size)
    for i in range(10, 20):
        Prompt(i).keep_in(tier)
        forget_unwritten(tier)
        if tier.store.was_full():  # as `Offload.poll`
            tier.capacity_bytes = tier.used_bytes
    assert tier.capacity_bytes < size
    assert Prompt(19).is_right_in(tier)
    right = [i for i in range(20) if Prompt(i).is_right_in(tier)]
    assert len(right) >= 3  # sqlite's log has the size of three
    tier = open_again(filled)
    assert [i for i in range(20) if Prompt(i).is_right_in(tier)] == right
    assert not tier.store.problems


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("no room")])
def test_a_read_that_fails_is_told_and_can_be_tried_again(tier, monkeypatch, error):
    monkeypatch.setattr(os, "preadv", Mock(side_effect=error))
    with pytest.raises(type(error), match=re.escape(str(error))):
        Prompt(3).read_from(tier)
    assert all(str(error) in problem for problem in tier.store.problems)
    monkeypatch.undo()
    assert Prompt(3).is_right_in(tier)


def test_reads_may_come_in_parts(tier, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:100]], at))
    assert all(Prompt(i).is_right_in(tier) for i in range(10))


def test_whatever_stops_the_writer_nobody_waits_for_it_for_ever(filled):
    class Lost(HostPages):
        def numpy(self):
            raise RuntimeError("the device is gone")

    tier = open_tier(filled)
    prompt = Prompt(10)
    lost = Lost(torch.zeros(1, PAGE, dtype=torch.uint8))
    prompt.bytes_of = lambda parts: [*Prompt(10).bytes_of(parts[:-1]), lost]
    assert prompt.keep_in(tier)
    told = []

    def flush():
        try:
            tier.store.flush()
        except OSError as error:
            told.append(str(error))

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert "the device is gone" in told[0]
    assert not Prompt(11).keep_in(tier)
    tier = open_again(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))


def test_no_file_grows_with_what_has_gone(tmp_path):
    tier = open_tier(tmp_path, capacity=4 * PROMPT_BYTES)
    for i in range(100):
        assert Prompt(i).keep_in(tier)
    tier.store.close()
    assert (tmp_path / "index.sqlite3").stat().st_size <= 10 * 4096
    assert (tmp_path / "pages.bin").stat().st_size <= 4 * PROMPT_BYTES
    assert {path.name for path in tmp_path.iterdir()} == {"index.sqlite3", "pages.bin"}
    tier = open_tier(tmp_path)
    assert [i for i in range(100) if Prompt(i).is_right_in(tier)] == [96, 97, 98, 99]
    assert not tier.store.problems


def test_a_record_that_went_and_came_again_follows_its_parent(tmp_path):
    tier = open_tier(tmp_path)
    assert Prompt(1).keep_in(tier)
    tier.remove(tier.find(Prompt(1).keys).chain()[0])
    assert Prompt(2).keep_in(tier)  # takes the pages
    assert Prompt(1).keep_in(tier)
    tier = open_again(tmp_path)
    assert Prompt(1).is_right_in(tier) and Prompt(2).is_right_in(tier)
