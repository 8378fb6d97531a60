"""A cache folder after kills, flipped bytes and mistakes: what is used is right, the rest named."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import in_fork
from matrix import matrix_rows
from waiting import LIMIT_S

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.offload import disk_log, disk_store
from megatron_hybrid.offload.disk_store import CacheFolderError, DiskStore
from megatron_hybrid.offload.offload import disk_tier
from megatron_hybrid.offload.page_mover import HostPages
from megatron_hybrid.offload.prefix_keys import PrefixKeys
from megatron_hybrid.offload.tier import state_record_pages

ROOT = Path(__file__).parents[3]
SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=3000, hidden_bytes=64)
PAGE = SPEC.page_bytes
MADE_FOR = {"weights": "w", "state_encoding": "exact"}
PROMPT = 40  # tokens: two blocks, and a state with a partial one


def pages_of(name: str, count: int) -> HostPages:
    """Bytes that only this name has."""
    seed = int.from_bytes(name.encode(), "little") % 2**63
    data = np.random.default_rng(seed).integers(0, 256, (count, PAGE), dtype=np.uint8)
    return HostPages(torch.from_numpy(data))


class Prompt:
    """Prompt number i, and what it leaves behind (`tier.Source`)."""

    def __init__(self, i: int):
        self.i = i
        self.keys = PrefixKeys(np.full(PROMPT, i, dtype=np.int32), "", 16)

    def blocks(self, indices):
        return [pages_of(f"{self.i} {index}", SPEC.kv_pages_per_block) for index in indices]

    def state(self):
        return pages_of(f"{self.i} state", state_record_pages(SPEC, PROMPT))

    def keep_in(self, tier) -> bool:
        return tier.keep(
            self.keys.blocks(2),
            self,
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
        expected = [*self.blocks([0, 1]), self.state()]
        assert all(torch.equal(a.data, b.data) for a, b in zip(read, expected, strict=True))
        return True


def open_tier(folder, capacity=1 << 30, made_for=MADE_FOR):
    return disk_tier(DiskStore(folder, PAGE, made_for), SPEC, capacity)


@pytest.fixture
def filled(tmp_path):
    """A folder with ten prompts."""
    tier = open_tier(tmp_path / "cache")
    assert all(Prompt(i).keep_in(tier) for i in range(10))
    tier.store.close()
    return tmp_path / "cache"


def test_what_was_written_is_there_after_a_restart(filled):
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    assert not Prompt(10).is_right_in(tier)
    assert not tier.store.problems
    assert Prompt(10).keep_in(tier)
    assert Prompt(10).is_right_in(tier)  # also while it is on its way
    tier.store.close()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(11))
    tier.store.close()


def test_the_file_does_not_outgrow_its_limit(tmp_path):
    prompt_bytes = (2 * SPEC.kv_pages_per_block + state_record_pages(SPEC, PROMPT)) * PAGE
    tier = open_tier(tmp_path, capacity=4 * prompt_bytes)
    for i in range(40):
        assert Prompt(i).keep_in(tier)
    tier.store.flush()
    assert os.path.getsize(tmp_path / "pages.bin") <= 4 * prompt_bytes
    right = [i for i in range(40) if Prompt(i).is_right_in(tier)]
    assert right == [36, 37, 38, 39]
    tier.store.close()
    log = (tmp_path / "index.log").read_bytes()
    tier = open_tier(tmp_path, capacity=2 * prompt_bytes)  # there is less room now
    assert len((tmp_path / "index.log").read_bytes()) < len(log) / 4  # what went left the log
    assert sum(Prompt(i).is_right_in(tier) for i in range(40)) == 2
    tier.store.close()


def test_the_file_is_cut_to_a_smaller_limit(filled, monkeypatch):
    prompt_bytes = (2 * SPEC.kv_pages_per_block + state_record_pages(SPEC, PROMPT)) * PAGE
    page_file = filled / "pages.bin"
    assert page_file.stat().st_size == 10 * prompt_bytes
    tier = open_tier(filled, capacity=5 * prompt_bytes)
    assert page_file.stat().st_size <= 5 * prompt_bytes
    right = [i for i in range(10) if Prompt(i).is_right_in(tier)]
    assert len(right) == 5
    tier.store.close()
    monkeypatch.setattr(os, "ftruncate", lambda *arguments: None)  # dies after the moves
    open_tier(filled, capacity=3 * prompt_bytes).store.close()
    monkeypatch.undo()
    tier = open_tier(filled, capacity=3 * prompt_bytes)
    assert page_file.stat().st_size <= 3 * prompt_bytes
    kept = [i for i in range(10) if Prompt(i).is_right_in(tier)]
    assert len(kept) == 3 and set(kept) < set(right)
    assert not tier.store.problems
    tier.clear()
    tier.store.rebind(OTHER_WEIGHTS)
    assert not page_file.stat().st_size
    assert Prompt(7).keep_in(tier)
    tier.store.flush()
    assert Prompt(7).is_right_in(tier)
    tier.store.close()


WRITER = """
import sys
sys.path[:0] = {paths}
from test_disk_store import Prompt, disk_log, open_tier
disk_log.MAX_STALE_LINES = 50  # the log is written anew all the time
tier = open_tier({folder!r}, capacity={capacity})
for i in range(100_000):
    while not tier.store.accepts():
        pass
    Prompt(i).keep_in(tier)
    if i % 20 == 0:
        tier.store.flush()
        print(i, flush=True)
"""


@pytest.mark.parametrize(
    ("kill_after", "crowded"),
    matrix_rows([(0.0, False), (0.013, True), (0.05, True)], (0.013, True)),
)
def test_kill_minus_9_loses_at_most_what_was_on_its_way(tmp_path, kill_after, crowded):
    folder, capacity = tmp_path / "cache", (300 << 10 if crowded else 1 << 30)
    paths = [str(Path(__file__).parent), str(ROOT / "tests/helpers"), str(ROOT)]
    script = WRITER.format(paths=paths, folder=str(folder), capacity=capacity)
    writer = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    flushed = [int(writer.stdout.readline()) for _ in range(4)]
    time.sleep(kill_after)
    writer.send_signal(signal.SIGKILL)
    flushed += [int(line) for line in writer.stdout.read().splitlines() if line]
    writer.wait()
    tier = open_tier(folder, capacity)
    right = [i for i in range(flushed[-1] + 400) if Prompt(i).is_right_in(tier)]
    assert flushed[-1] in right
    if not crowded:
        assert right[: flushed[-1] + 1] == list(range(flushed[-1] + 1))
    # Only a torn last line may be told of; every page that a line names is as it was.
    assert all("incomplete" in problem for problem in tier.store.problems)
    assert Prompt(10**6).keep_in(tier)
    tier.store.close()


def test_any_flipped_byte_is_refused_and_named(filled, tmp_path):
    random = np.random.default_rng(0)
    refused = 0
    for trial in range(30):
        name = ("pages.bin", "index.log")[trial % 2]
        copy = tmp_path / str(trial)
        shutil.copytree(filled, copy)
        content = bytearray((copy / name).read_bytes())
        content[random.integers(len(content))] ^= 1 << int(random.integers(8))
        (copy / name).write_bytes(content)
        tier = open_tier(copy)
        right = [Prompt(i).is_right_in(tier) for i in range(10)]
        assert sum(right) >= 8  # a newline that went joins two lines
        if not all(right):
            assert any(name in problem for problem in tier.store.problems)
            refused += 1
        tier.store.close()
    assert refused > 20  # pages that no record uses may change unseen


@pytest.mark.parametrize("name", ["pages.bin", "index.log"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_file_that_was_cut_off(filled, name, share):
    path = filled / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    tier = open_tier(filled)
    right = sum(Prompt(i).is_right_in(tier) for i in range(10))
    assert int(share * 10) - 1 <= right < 10
    tier.store.close()


def test_a_damaged_record_is_forgotten_and_can_come_again(filled):
    content = bytearray((filled / "pages.bin").read_bytes())
    content[PAGE // 2] ^= 1  # the first block of the first prompt
    (filled / "pages.bin").write_bytes(content)
    tier = open_tier(filled)
    assert Prompt(0).read_from(tier)[0] is None
    tier.remove(tier.find(Prompt(0).keys).chain()[0])
    assert tier.find(Prompt(0).keys) is None
    assert Prompt(0).keep_in(tier)
    tier.store.close()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    tier.store.close()


# Folders that are not ours ---------------------------------------------------------------------


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.mark.parametrize(
    ("made_for", "message"),
    [
        ({**MADE_FOR, "weights": "other"}, "for another weights: 'w' there, 'other' here"),
        ({**MADE_FOR, "state_encoding": "int8"}, "for another state encoding: 'exact' there"),
    ],
)
def test_a_folder_for_another_model_or_configuration_is_refused(filled, made_for, message):
    before = listing(filled)
    with pytest.raises(CacheFolderError, match=message) as error:
        open_tier(filled, made_for=made_for)
    assert str(filled / "cache.json") in str(error.value)
    assert listing(filled) == before


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CacheFolderError, match=r"holds 'thesis.tex' and no cache\.json"):
        open_tier(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("head", [b"", b"{", b"[]", b'{"format": 1', b"{}", b'{"formaT": 1}'])
def test_a_damaged_head_is_named(filled, head):
    (filled / "cache.json").write_bytes(head)
    with pytest.raises(CacheFolderError, match=r"cache\.json is damaged"):
        open_tier(filled)


def test_a_later_format_is_refused(filled):
    head = json.loads((filled / "cache.json").read_text())
    (filled / "cache.json").write_text(json.dumps({**head, "format": 4}))
    with pytest.raises(CacheFolderError, match="another format: 4 there, 3 here"):
        open_tier(filled)


OTHER_WEIGHTS = {**MADE_FOR, "weights": "new"}


def test_what_other_weights_made_never_fits(filled):
    """Whatever the log says: not after a clear, nor under a head that is not theirs."""
    log = (filled / "index.log").read_bytes()
    tier = open_tier(filled)
    tier.clear()
    tier.store.rebind(OTHER_WEIGHTS)
    tier.store.close()
    assert not (filled / "index.log").read_bytes()  # no line that could be damaged
    (filled / "index.log").write_bytes(log)
    tier = open_tier(filled, made_for=OTHER_WEIGHTS)
    assert not any(Prompt(i).is_right_in(tier) for i in range(10))
    tier.store.close()


def test_bytes_of_one_record_do_not_fit_another(filled):
    tier = open_tier(filled)
    first, second = (tier.find(Prompt(i).keys) for i in (0, 1))
    placed = tier.store._placed
    placed[first.key] = dataclasses.replace(placed[second.key], record=first)
    assert tier.store.get(first).result() is None
    tier.store.close()


def test_what_cannot_be_told_of_the_new_weights_is_not_written(filled, monkeypatch):
    tier = open_tier(filled)
    tier.clear()
    write_whole = disk_store.write_whole

    def full(path, data):
        if path.name == "cache.json":
            raise OSError(28, "No space left on device")
        write_whole(path, data)

    monkeypatch.setattr(disk_store, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        tier.store.rebind(OTHER_WEIGHTS)
    assert not Prompt(3).keep_in(tier)
    tier.store.close()
    monkeypatch.undo()
    tier = open_tier(filled)  # still for the old ones, and empty
    assert not tier.find(Prompt(3).keys)
    tier.store.close()


@pytest.mark.parametrize("by_another", [False, True])
def test_a_folder_that_was_removed_is_told(filled, by_another):
    tier = open_tier(filled)
    shutil.rmtree(filled)
    if by_another:
        other = open_tier(filled, made_for=OTHER_WEIGHTS)
        assert Prompt(1).keep_in(other)
        other.store.flush()
        before = listing(filled)
    assert Prompt(10).keep_in(tier)
    for fails in (tier.store.recover, tier.store.flush):
        with pytest.raises(OSError, match=r"lock was removed or replaced.*close the engine"):
            fails()
    with pytest.raises(OSError, match="lock was removed or replaced"):
        tier.store.rebind({**MADE_FOR, "weights": "third"})
    if by_another:
        assert listing(filled) == before
        other.store.close()
    tier.store.close()


def test_two_engines_do_not_share_a_folder(filled):
    tier = open_tier(filled)
    with pytest.raises(CacheFolderError, match="in use by another engine"):
        open_tier(filled)
    tier.store.close()
    open_tier(filled).store.close()


def test_a_forked_process_does_not_keep_the_lock(filled):
    tier = open_tier(filled)
    inherited = os.dup(tier.store._lock)  # what a fork has
    tier.store.close()
    open_tier(filled).store.close()
    os.close(inherited)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_leaves_the_folder_alone(filled):
    tier = open_tier(filled)
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

    assert in_fork(check) == 0
    with pytest.raises(CacheFolderError, match="in use by another engine"):
        open_tier(filled)
    assert Prompt(1).is_right_in(tier)
    assert Prompt(10).keep_in(tier)
    tier.store.close()
    open_tier(filled).store.close()


def test_a_store_is_closed_by_its_own_threads(filled):
    """The garbage collector runs in whichever thread it likes."""
    tier = open_tier(filled)
    tier.store._readers.submit(tier.store.close_from_anywhere).result(10)
    for thread in threading.enumerate():
        if thread.name == "cache-close":
            thread.join(LIMIT_S)
    open_tier(filled).store.close()


def test_the_files_are_for_their_owner(filled):
    assert {path.stat().st_mode & 0o777 for path in filled.iterdir()} == {0o600}


def test_a_path_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match="cannot be used as a cache folder"):
        open_tier(tmp_path / "file")


@pytest.mark.parametrize("name", ["cache.json", "index.log", "pages.bin", "lock"])
def test_a_folder_in_the_place_of_a_file(filled, name):
    (filled / name).unlink()
    (filled / name).mkdir()
    with pytest.raises(CacheFolderError, match=f"{name} is no file"):
        open_tier(filled)


@pytest.mark.parametrize("name", ["cache.json", "index.log", "pages.bin", "lock", "index.log.new"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_a_file(filled, tmp_path, name, exists):
    thesis = tmp_path / "thesis.tex"
    if exists:
        thesis.write_text("years of work")
    (filled / name).unlink(missing_ok=True)
    (filled / name).symlink_to(thesis)
    with pytest.raises(CacheFolderError, match=f"{name} is a link"):
        open_tier(filled)
    assert not exists or thesis.read_text() == "years of work"
    assert thesis.exists() == exists


def test_the_folder_may_be_a_link(filled, tmp_path):
    (tmp_path / "link").symlink_to(filled)
    tier = open_tier(tmp_path / "link")
    assert Prompt(3).is_right_in(tier)
    tier.store.close()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"{",
        b'{"op":"put","key":"zz"}',
        b'{"op":"put","key":"ab","slots":3}',
        b'{"op":"put","key":"ab","slots":[["a",1]]}',
        b'{"op":"put","key":"ab","slots":[[-1,1]],"position":1,"state":false,"saved":0,"cost":0,'
        b'"parent":"","sum":""}',
        b'{"op":"put","key":"ab","slots":[[0,99999999999999999]],"position":1,"state":false,'
        b'"saved":0,"cost":0,"parent":"","sum":""}',
        b'{"op":"put","key":"ab","slots":[[0,1]],"position":null,"state":false,"saved":0,"cost":0,'
        b'"parent":"","sum":""}',
    ],
)
def test_a_line_of_somebody_else_is_named_and_left_out(filled, text):
    with open(filled / "index.log", "ab") as log:
        log.write(b"%08x %s\n" % (zlib.crc32(text), text))
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    assert [problem for problem in tier.store.problems if "line 31: not used" in problem]
    tier.store.close()


def test_problems_do_not_fill_the_memory(filled):
    tier = open_tier(filled)
    for i in range(disk_store.MAX_PROBLEMS + 5):
        tier.store._warn("", str(i))
    assert len(tier.store.problems) == disk_store.MAX_PROBLEMS
    assert tier.store.problems[0].endswith(": 5")
    tier.store.close()


def test_a_log_that_cannot_be_read(filled, monkeypatch):
    def broken(path, mode):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk_log, "open", broken, raising=False)
    with pytest.raises(CacheFolderError, match=r"index\.log cannot be read .* remove"):
        open_tier(filled)
    monkeypatch.undo()
    open_tier(filled).store.close()


def test_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tier = open_tier("cache")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tier.clear()
    tier.store.rebind(OTHER_WEIGHTS)
    assert Prompt(1).keep_in(tier)
    tier.store.flush()
    tier.store.close()
    assert not list(Path().iterdir())
    tier = open_tier(tmp_path / "cache", made_for=OTHER_WEIGHTS)
    assert Prompt(1).is_right_in(tier)
    tier.store.close()


# A disk without space ----------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch):
    """A disk without space, until `undo`."""

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    def fill():
        for name in ("pwrite", "write", "replace"):
            monkeypatch.setattr(os, name, refuse)
        return monkeypatch

    return fill


def test_a_full_disk_can_be_read(filled, full):
    patch = full()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    assert "No space left" in tier.store.problems[0]
    tier.remove(tier.find(Prompt(3).keys))
    assert not Prompt(10).keep_in(tier)
    tier.store.close()
    patch.undo()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))  # the drop could not be noted
    assert not tier.store.problems
    tier.store.close()


def test_a_new_folder_on_a_full_disk_is_refused(tmp_path, full):
    patch = full()
    with pytest.raises(CacheFolderError, match=r"No space left .* disk with free space"):
        open_tier(tmp_path / "cache")
    patch.undo()
    open_tier(tmp_path / "cache").store.close()


@pytest.mark.parametrize("by", ["time", "recover"])
def test_a_disk_with_space_again_is_written_again(filled, full, monkeypatch, by):
    tier = open_tier(filled)
    log = (filled / "index.log").read_bytes()
    patch = full()
    assert Prompt(10).keep_in(tier)
    with pytest.raises(OSError, match=f"writing to {filled} failed: .* No space left"):
        tier.store.flush()
    with pytest.raises(OSError, match=f"writing to {filled} failed: .* No space left"):
        tier.store.recover()
    unwritten = tier.store.take_lost()
    assert len(unwritten) == 3 == tier.store.num_unwritten
    for record in unwritten:
        tier.remove(record)
    tier.remove(tier.find(Prompt(3).keys))
    patch.undo()
    # A crash now would find what was there before.
    tier.store._wait_for_jobs()
    assert (filled / "index.log").read_bytes() == log
    if by == "recover":
        tier.store.recover()
    else:
        later = time.monotonic() + disk_store.RETRY_SECONDS
        monkeypatch.setattr(disk_store.time, "monotonic", lambda: later)
    assert Prompt(10).keep_in(tier) and Prompt(11).keep_in(tier)
    tier.store.recover()
    tier.store.flush()
    tier.store.close()
    tier = open_tier(filled)
    assert [i for i in range(12) if Prompt(i).is_right_in(tier)] == [0, 1, 2, *range(4, 12)]
    assert not tier.store.problems
    tier.store.close()


def test_a_log_that_was_cut_off_by_a_full_disk_is_written_anew(filled, monkeypatch):
    tier = open_tier(filled)
    write, left = os.write, [100]

    def soon_full(descriptor, data):
        if not left:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: left.pop()])

    monkeypatch.setattr(os, "write", soon_full)
    assert Prompt(10).keep_in(tier)
    tier.store._wait_for_jobs()
    monkeypatch.undo()
    tier.store.recover()
    for record in tier.store.take_lost():
        tier.remove(record)
    assert Prompt(11).keep_in(tier)
    tier.store.close()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in (*range(10), 11))
    assert not tier.store.problems
    tier.store.close()


@pytest.fixture
def small_disk(monkeypatch):
    """Gives the files of a folder so many bytes together."""
    write, pwrite = os.write, os.pwrite

    def make(folder, size):
        def room_for(descriptor, data, end):
            files = [path.stat() for path in folder.iterdir()]
            own = os.fstat(descriptor)
            if not any(os.path.samestat(own, file) for file in files):
                return data
            free = size - sum(file.st_size for file in files)
            count = len(data) - max(0, end - own.st_size - max(0, free))
            if count <= 0:
                raise OSError(28, "No space left on device")
            return data[:count]

        def small_write(descriptor, data):
            end = os.fstat(descriptor).st_size + len(data)
            return write(descriptor, room_for(descriptor, data, end))

        def small_pwrite(descriptor, data, offset):
            return pwrite(descriptor, room_for(descriptor, data, offset + len(data)), offset)

        monkeypatch.setattr(os, "write", small_write)
        monkeypatch.setattr(os, "pwrite", small_pwrite)
        monkeypatch.setattr(disk_store, "RETRY_SECONDS", 0.0)

    return make


def forget_unwritten(tier):
    tier.store._wait_for_jobs()
    for record in tier.store.take_lost():
        tier.remove(record)


def test_what_found_no_room_makes_room_for_the_log(tmp_path, small_disk):
    """Its pages are cut off before the log is written anew."""
    tier = open_tier(tmp_path)
    small_disk(tmp_path, 60_000)
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
    tier.store.close()
    tier = open_tier(tmp_path)
    right = [j for j in range(i + 1) if Prompt(j).is_right_in(tier)]
    assert len(right) == len(before) - 1 and Prompt(100).is_right_in(tier)
    assert not tier.store.problems
    tier.store.close()


def test_where_there_is_no_room_for_the_log_the_last_records_make_it(filled, small_disk):
    tier = open_tier(filled)
    size = sum(path.stat().st_size for path in filled.iterdir())
    small_disk(filled, size)
    assert Prompt(10).keep_in(tier)
    forget_unwritten(tier)
    assert tier.store.was_full()
    tier.capacity_bytes = tier.used_bytes
    for i in range(11, 20):
        Prompt(i).keep_in(tier)
        forget_unwritten(tier)
    assert Prompt(19).is_right_in(tier)
    right = [i for i in range(20) if Prompt(i).is_right_in(tier)]
    assert len(right) >= 7
    assert sum(path.stat().st_size for path in filled.iterdir()) <= size
    tier.store.close()
    tier = open_tier(filled)
    assert [i for i in range(20) if Prompt(i).is_right_in(tier)] == right
    assert not tier.store.problems
    tier.store.close()


def test_a_process_that_dies_before_the_new_log_is_there(filled, monkeypatch):
    """The pages were cut before; the old log names some that are not there."""
    tier = open_tier(filled)
    for i in range(5, 10):
        tier.remove(tier.find(Prompt(i).keys))
    tier.store._wait_for_jobs()
    log = (filled / "index.log").read_bytes().splitlines(keepends=True)[:30]
    tier.store._compact()
    tier.store.close()
    (filled / "index.log").write_bytes(b"".join(log))  # without the drops
    tier = open_tier(filled)
    assert [i for i in range(10) if Prompt(i).is_right_in(tier)] == [0, 1, 2, 3, 4]
    assert all("pages are not there" in problem for problem in tier.store.problems)
    tier.store.close()


def test_a_disk_that_refuses_is_told_and_costs_nothing_else(filled, monkeypatch):
    tier = open_tier(filled)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert Prompt(10).keep_in(tier)
    with pytest.raises(OSError, match="No space left"):
        tier.store.flush()
    assert not Prompt(11).keep_in(tier)
    assert not Prompt(10).is_right_in(tier)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    assert any("No space left" in problem for problem in tier.store.problems)
    tier.store.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("no room")])
def test_a_read_that_fails_is_told_and_can_be_tried_again(filled, monkeypatch, error):
    tier = open_tier(filled)

    def broken(*arguments):
        raise error

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(type(error), match=re.escape(str(error))):
        Prompt(3).read_from(tier)
    assert all(str(error) in problem for problem in tier.store.problems)
    monkeypatch.undo()
    assert Prompt(3).is_right_in(tier)
    tier.store.close()


def test_reads_may_come_in_parts(filled, monkeypatch):
    tier = open_tier(filled)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:100]], at))
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    tier.store.close()


def test_whatever_stops_the_writer_nobody_waits_for_it_for_ever(filled):
    class Lost(HostPages):
        def numpy(self):
            raise RuntimeError("the device is gone")

    tier = open_tier(filled)
    prompt = Prompt(10)
    prompt.state = lambda: Lost(torch.zeros(1, PAGE, dtype=torch.uint8))
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
    tier.store.close()
    tier = open_tier(filled)
    assert all(Prompt(i).is_right_in(tier) for i in range(10))
    tier.store.close()


def test_the_log_does_not_grow_with_what_has_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_log, "MAX_STALE_LINES", 20)
    prompt_bytes = (2 * SPEC.kv_pages_per_block + state_record_pages(SPEC, PROMPT)) * PAGE
    tier = open_tier(tmp_path, capacity=4 * prompt_bytes)
    for i in range(100):
        assert Prompt(i).keep_in(tier)
    tier.store.flush()
    assert (tmp_path / "index.log").read_bytes().count(b"\n") <= 2 * 15 + 20
    right = [i for i in range(100) if Prompt(i).is_right_in(tier)]
    tier.store.close()
    tier = open_tier(tmp_path)
    assert [i for i in range(100) if Prompt(i).is_right_in(tier)] == right == [96, 97, 98, 99]
    assert not tier.store.problems
    tier.store.close()


def test_a_lost_line_costs_only_what_it_told_of(tmp_path):
    """A block went and came again behind its child; of both only the later lines count."""
    tier = open_tier(tmp_path)
    assert Prompt(1).keep_in(tier)
    tier.remove(tier.find(Prompt(1).keys).chain()[0])
    assert Prompt(2).keep_in(tier)  # takes the pages
    assert Prompt(1).keep_in(tier)
    tier.store.close()
    lines = (tmp_path / "index.log").read_bytes().splitlines(keepends=True)
    for lost in range(3, 6):  # the drops
        (tmp_path / "index.log").write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
        tier = open_tier(tmp_path)
        assert Prompt(1).is_right_in(tier) and Prompt(2).is_right_in(tier)
        assert not tier.store.problems
        tier.store.close()


def test_a_folder_that_could_not_be_loaded_can_be_opened_again(filled, monkeypatch):
    monkeypatch.setattr(disk_log.DiskLog, "read", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_tier(filled)
    monkeypatch.undo()
    open_tier(filled).store.close()
