"""What one rank alone meets: the others decide as it does, or the job ends on all of them."""

import errno
import os
import re
import shutil
import socket
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import free_port
from matrix import asked, matrix_rows
from rank_faults import frozen, killed, raising, stuck
from rank_processes import join_ranks, on_ranks, start_ranks, told_by_torchrun
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from split_models import load
from waiting import LIMIT_S, wait_until

from megatron_hybrid.checkpoints import pretrained
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.distributed import watchdog
from megatron_hybrid.distributed.ranks import RankError
from megatron_hybrid.inference import rank_checks
from megatron_hybrid.inference.memory.cache_pool import CachePool
from megatron_hybrid.inference.scheduling.scheduler import RestoreFailedError
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.sharding.parallel_setup import initialize_distributed
from megatron_hybrid.offload.page_mover import PageMover

RANKS = 2
MODEL = dict(layer_pattern="M*S-W*", mamba_num_groups=2, sliding_window=20)
PROMPTS = [random_tokens(90, seed=seed) for seed in range(4)]


def make_engine(model, **fields):
    sizes = {"cache_bytes": 1 << 20, "max_requests": 4, "max_sequence_length": 160}
    return tiny_engine(model, **{**sizes, "verify_ranks": True, **fields})


@contextmanager
def failing(target, name, error, *, on=True, times=10**9):
    """Calls of a method raise, the first `times` of them."""
    original, left = getattr(target, name), [times]

    def fail(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise error
        return original(*args, **kwargs)

    if not on:
        yield
        return
    with mock.patch.object(target, name, fail):
        yield


def ask(engine, *prompts):
    results = engine.generate(list(prompts), greedy(5))
    return [(r.token_ids, r.prefix.skipped_tokens, r.prefix.fetched_tokens) for r in results]


def refusal():
    """The failing rank's own error, and on the other rank a RankError with its text."""
    return pytest.raises((MemoryError, OSError, RankError), match="there is no more")


NO_MEMORY = MemoryError("there is no more")
NO_SPACE = OSError(errno.ENOSPC, "there is no more")


def no_room_for_states(model, rank, folder):
    engine = make_engine(model)
    with failing(engine.memory, "save_checkpoint", NO_MEMORY, on=rank == 1):
        found = ask(engine, PROMPTS[0])
    return engine, found + ask(engine, PROMPTS[0]) + ask(engine, PROMPTS[0])


def no_room_to_park(model, rank, folder):
    pages = make_engine(model).cache.spec.page_bytes
    engine = make_engine(model, cache_bytes=30 * pages, max_tokens=32, max_sequence_length=80)
    prompts = [prompt[:30] for prompt in PROMPTS[:3]]
    with failing(engine.memory, "park", NO_MEMORY, on=rank == 1):
        results = engine.generate(prompts, greedy(40))
    assert engine.stats()["preemptions"] > 0
    return engine, [(r.token_ids, 0, 0) for r in results]


def no_room_to_restore(model, rank, folder):
    engine = make_engine(model)
    found = ask(engine, PROMPTS[0])
    with failing(engine.memory, "load_checkpoint", NO_MEMORY, on=rank == 1):
        beside = engine.add_request(PROMPTS[1], greedy(5))
        engine.step()
        found += ask(engine, PROMPTS[0])
    found.append((beside.token_ids, 0, 0))
    with failing(engine.memory, "load_checkpoint", NO_MEMORY, on=rank == 1):
        alone = engine.add_request(PROMPTS[0], greedy(5))
        with pytest.raises(RestoreFailedError):
            engine.step()
    while not alone.closed:
        engine.step()
    return engine, [*found, (alone.token_ids, 0, 0)]


def no_room_to_fetch(model, rank, folder):
    engine = make_engine(model, host_cache_bytes=1 << 20)
    found = ask(engine, PROMPTS[0])
    engine.cache.evict(10**6)
    with failing(PageMover, "to_pool", NO_MEMORY, on=rank == 1):
        return engine, found + ask(engine, PROMPTS[0])


def no_room_in_host_memory(model, rank, folder):
    engine = make_engine(model, host_cache_bytes=1 << 20)
    found = ask(engine, PROMPTS[0]) + ask(engine, PROMPTS[1])
    with failing(PageMover, "to_host", NO_MEMORY, on=rank == 1, times=1):
        engine.cache.evict(10**6)
    found += ask(engine, PROMPTS[0], PROMPTS[1])
    engine.cache.evict(10**6)
    return engine, found + ask(engine, PROMPTS[0], PROMPTS[1])


def full_disk(model, rank, folder):
    engine = make_engine(model, cache_dir=folder)
    with failing(os, "pwrite", NO_SPACE, on=rank == 1):
        found = ask(engine, PROMPTS[0])
        engine.cache.evict(10**6)
        with suppress(OSError):
            engine.offload.disk.store.flush()
        found += ask(engine, PROMPTS[0], PROMPTS[1])
    return engine, found + ask(engine, PROMPTS[0])


def save_to_a_full_disk(model, rank, folder):
    engine = make_engine(model, cache_dir=folder)
    found = ask(engine, PROMPTS[0])
    with failing(os, "pwrite", NO_SPACE, on=rank == 1), refusal():
        engine.save_cache()
    return engine, found + ask(engine, PROMPTS[0]) + ask(engine, PROMPTS[1])


def damaged_disk(model, rank, folder):
    engine = make_engine(model, cache_dir=folder)
    found = ask(engine, PROMPTS[0])
    engine.cache.evict(10**6)
    engine.offload.disk.store.flush()
    if rank == 1:
        pages = engine.offload.disk.store.folder / "pages.bin"
        pages.write_bytes(b"\xff" * pages.stat().st_size)
    found += ask(engine, PROMPTS[0])
    return engine, found + ask(engine, PROMPTS[0])


def slow_disk(model, rank, folder):
    engine = make_engine(model, cache_dir=folder)
    found = ask(engine, PROMPTS[0])
    engine.cache.evict(10**6)
    engine.offload.disk.store.flush()
    read = os.preadv
    with mock.patch.object(os, "preadv", lambda *of: (time.sleep(0.2 * rank), read(*of))[1]):
        return engine, found + ask(engine, PROMPTS[0], PROMPTS[1])


def lost_folder(model, rank, folder):
    engine = make_engine(model, cache_dir=folder)
    found = ask(engine, PROMPTS[0], PROMPTS[1])
    engine.save_cache()
    engine.close()
    if rank == 1:
        shutil.rmtree(f"{folder}/rank-1-of-2")
    engine = make_engine(model, cache_dir=folder)
    return engine, found + ask(engine, PROMPTS[0]) + ask(engine, PROMPTS[1])


def changed_weights(model, rank, folder):
    engine = make_engine(model)
    found = ask(engine, PROMPTS[0])
    if rank == 1:  # by a write that changes nothing, so that the answer is known
        with torch.no_grad():
            next(model.parameters()).mul_(1.0)
    found += ask(engine, PROMPTS[0])
    assert engine.epoch == 1
    return engine, found


def no_room_to_suspend(model, rank, folder):
    engine = make_engine(model)
    found = ask(engine, PROMPTS[0])
    with failing(engine.memory, "keep", NO_MEMORY, on=rank == 1, times=1), refusal():
        engine.suspend("host")
    assert not engine.is_suspended
    engine.suspend("host")
    with failing(engine.memory, "reacquire", NO_MEMORY, on=rank == 1, times=1), refusal():
        engine.resume()
    assert engine.is_suspended
    engine.resume()
    return engine, found + ask(engine, PROMPTS[0])


CASES = {
    no_room_for_states: [0, 0, 90],
    no_room_to_park: None,
    no_room_to_restore: [0, 90, 0, 0],  # the report of the first attempt
    no_room_to_fetch: [0, 0],
    no_room_in_host_memory: None,
    full_disk: [0, 0, 0, 90],
    save_to_a_full_disk: [0, 90, 0],
    damaged_disk: [0, 0, 90],
    slow_disk: [0, 90, 0],
    lost_folder: [0, 0, 0, 0],
    changed_weights: [0, 0],
    no_room_to_suspend: [0, 90],
}
"""Skipped tokens of each answer: what the failure costs, and no more; None: as it happens."""


def start(folder):
    return load(folder, tensor_model_parallel_size=RANKS).eval()


def run_all(folder):
    model, rank, given = start(folder), dist.get_rank(), {}
    for case in CASES:
        engine, answers = case(model, rank, f"{folder}/{case.__name__}")
        engine.check_integrity()
        stats = engine.stats()
        keys = ("checkpoints", "pages_free", "host_states", "disk_states", "disk_kv_blocks")
        given[case.__name__] = answers, [stats[key] for key in keys], str(engine.cache.digest())
        engine.close()
    for case in (*DIFFERENCES, *ON_ONE):
        given[case.__name__] = told_of(case, model, rank)
        dist.barrier()  # else the next engine of one rank could meet this one of the other
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rank_failures")
    save_checkpoint(tiny_model(**MODEL), folder)
    return folder


@pytest.fixture(scope="module")
def by_rank(folder):
    return on_ranks(run_all, RANKS, folder, str(folder))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_invariant_7_ranks_stay_alike_where_one_fails(by_rank, case):
    answers, *state = by_rank[0][case.__name__]
    assert by_rank[1][case.__name__] == (answers, *state)
    model = tiny_model(**MODEL)
    for tokens, _, _ in answers:
        prompts = [p for p in (*PROMPTS, *(p[:30] for p in PROMPTS)) if is_greedy(model, p, tokens)]
        assert prompts, tokens
    if CASES[case] is not None:
        assert [skipped for _, skipped, _ in answers] == CASES[case]


# Ranks that differ ------------------------------------------------------------------------------


def another_prompt(make, rank):
    make().generate([PROMPTS[rank]], greedy(5))


def other_tokens_after_equal_calls(make, rank):
    engine = make(verify_ranks=True)
    engine.add_request(PROMPTS[0], greedy(5)).tokens[7] = rank
    engine.step()


def an_update_on_one_rank(make, rank):
    engine = make()
    if rank == 1:
        engine.update_weights()
    engine.generate([PROMPTS[0]], greedy(5))


def another_suspension(make, rank):
    make().suspend(("drop", "host")[rank])


def one_rank_follows(make, rank):
    engine = make()
    if rank == 1:
        engine.follow()
    engine.generate([PROMPTS[0]], greedy(5))


def an_error_on_one_rank(make, rank):
    engine = make()
    engine.generate([PROMPTS[0]], greedy(5))
    answers = {"return_value": PROMPTS[1]} if rank == 0 else {"side_effect": NO_MEMORY}
    engine.request_builder.tokenizer = SimpleNamespace(tokenize=mock.Mock(**answers))
    engine.generate(["a text"], greedy(5))


def training_mode_on_one_rank(make, rank):
    engine = make()
    if rank == 1:
        engine.model.train()
    try:
        engine.generate([PROMPTS[0]], greedy(5))
    finally:
        engine.model.eval()


def another_config(make, rank):
    make(max_tokens=64 * (1 + rank))


def a_folder_on_one_rank(make, rank):
    make(cache_dir="/tmp/not-made" if rank else None)


def another_version(make, rank):
    with mock.patch.object(rank_checks, "__version__", f"0.{rank}"):
        make()


def other_weights(make, rank):
    usual = make().model.decoder.final_norm.weight.data.clone()
    try:
        make(weights=usual + rank)
    finally:
        make(weights=usual)


def another_draw(make, rank):
    make(drawn_with=rank)


def no_room_on_one_rank(make, rank):
    with failing(CachePool, "__init__", NO_MEMORY, on=rank == 1):
        make()


DIFFERENCES = {
    # What both ranks are told, with {} for "rank 0 on the host" and "rank 1 on the host".
    another_prompt: r"{} has called add_request\(\) with \d+ at position 0 of tokens, {} has",
    other_tokens_after_equal_calls: "decided differently or compute different tokens",
    an_update_on_one_rank: r"{} has called add_request\(\) .*, {} has called update_weights\(\)",
    another_suspension: r"{} .* suspend\(\) with keep_cache 'drop', {} .* keep_cache 'host'",
    one_rank_follows: r"{} has called add_request\(\) .*, {} has called follow\(\)",
    another_config: r"InferenceConfig.max_tokens differs .*: {} has '64', {} has '128'",
    a_folder_on_one_rank: "the use of InferenceConfig.cache_dir differs",
    another_version: "the version of megatron_hybrid differs .*: {} has '0.0', {} has '0.1'",
    other_weights: r"the hash of decoder.final_norm.weight differs .*: {} has .*, {} has ",
    another_draw: r"the seed of the random weights differs .*: {} has 0, {} has 1",
}
ON_ONE = {
    # The type of rank 1's own error, and what rank 0 is told, with {} for "rank 1 on the host".
    an_error_on_one_rank: (MemoryError, "generate() failed on {}: MemoryError: there is no"),
    training_mode_on_one_rank: (RuntimeError, "step() failed on {}: RuntimeError: the model is in"),
    no_room_on_one_rank: (MemoryError, "making an engine failed on {}: MemoryError: there is no"),
}


def told_of(case, model, rank):
    """Type and text of the error that a rank gets."""
    made = []

    def make(weights=None, drawn_with=None, **fields):
        served = model
        if drawn_with is not None:
            torch.manual_seed(drawn_with)
            served = build_hybrid_model(model.config).eval()
        if weights is not None:
            served.decoder.final_norm.weight.data.copy_(weights)
        made.append(make_engine(served, **{"verify_ranks": False, **fields}))
        return made[0]

    found = "nothing", ""
    try:
        case(make, rank)
    except Exception as error:
        found = type(error).__name__, str(error)
    for engine in made:
        engine.close()
    return found


@pytest.mark.parametrize("case", DIFFERENCES, ids=lambda case: case.__name__)
def test_ranks_that_differ_are_told_whose_values(by_rank, case):
    names = [f"rank {rank} on {socket.gethostname()}" for rank in range(RANKS)]
    for found in by_rank:
        kind, text = found[case.__name__]
        assert kind in ("RankError", "RankFailedError", "ValueError")
        assert re.search(DIFFERENCES[case].format(*names), text), text


@pytest.mark.parametrize("case", ON_ONE, ids=lambda case: case.__name__)
def test_a_rank_that_raises_keeps_its_error_and_the_others_are_told(by_rank, case):
    own, said = ON_ONE[case]
    told, raised = (found[case.__name__] for found in by_rank)
    assert raised[0] == own.__name__
    assert told[0] in ("RankError", "RankFailedError")
    assert said.format(f"rank 1 on {socket.gethostname()}") in told[1]


# Failures that end the job ----------------------------------------------------------------------


def leaves(*_):
    os._exit(0)


def decides_otherwise(engine):
    """A state that all ranks would save finds no memory in this one's books."""
    engine.cache.reserve_checkpoint = mock.Mock(side_effect=NO_MEMORY)


ENDS = {
    # Name: (rank that fails, how, whether its process lives on, whether the first rank is idle)
    "a following rank raises": (1, raising, False, False),
    "a following rank raises and stays": (1, raising, True, False),
    "a following rank dies": (1, killed, False, False),
    "a following rank dies while nothing runs": (1, killed, False, True),
    "a following rank dies before new weights": (1, killed, False, False),
    "a following rank decides otherwise": (1, decides_otherwise, False, False),
    "the leading rank raises": (0, raising, False, False),
    "the leading rank dies": (0, killed, False, False),
    "a following rank is frozen": (1, frozen, False, False),
    "a following rank is stuck": (1, stuck, False, False),
    "the leading rank is frozen": (0, frozen, False, False),
    "the leading rank is stuck": (0, stuck, False, False),
    "a rank dies where all make the calls": (1, killed, False, False),
}
ROWS = matrix_rows(
    ENDS,
    "a following rank decides otherwise",
    "a following rank is frozen",
    "the leading rank is stuck",
)


def run_to_the_end(rank, folder, name):
    os.dup2(os.open(f"{folder}/{name}.{rank}.log", os.O_CREAT | os.O_WRONLY), 2)
    failing_rank, fail, stays, idle = ENDS[name]
    watchdog.SILENCE_SECONDS, timeout = 5.0, 3.0 if fail is stuck else None
    join_ranks(rank, RANKS, f"{folder}/{name}.rendezvous")
    model = start(folder)
    if rank == failing_rank == 1 and not idle and fail is not decides_otherwise:
        steps = iter(range(100))
        model.register_forward_pre_hook(lambda *_: fail() if next(steps) == 7 else None)
    engine = make_engine(model, rank_timeout=timeout)
    if name.endswith("make the calls"):
        for prompt in PROMPTS:
            ask(engine, prompt)
        return
    if rank == 0:
        with engine.lead():
            ask(engine, PROMPTS[0])
            if idle:
                time.sleep(2 * LIMIT_S)
            if failing_rank == 0:
                model.register_forward_pre_hook(fail)
            if name.endswith("new weights"):
                wait_until(lambda: engine.rank_failure is not None)
                engine.load_weights({})
            ask(engine, PROMPTS[1])
        return
    if idle or name.endswith("new weights"):
        threading.Timer(1.0, fail).start()
    elif fail is decides_otherwise:
        fail(engine)
    try:
        engine.follow()
    finally:
        if stays:
            time.sleep(2 * LIMIT_S)


@pytest.fixture(scope="module")
def ended(request, folder):
    """By name: exit codes and what the ranks wrote to stderr; all have ended."""
    names, found = asked(request, "name", ENDS), {}
    jobs = {name: start_ranks(run_to_the_end, RANKS, str(folder), name) for name in names}
    for name, processes in jobs.items():
        failing_rank, _, stays, _ = ENDS[name]
        other = processes[1 - failing_rank]
        other.join(LIMIT_S)
        has_ended = not other.is_alive()
        if stays:
            processes[failing_rank].kill()
        for process in processes:
            process.join(LIMIT_S)
        alive = [process.is_alive() for process in processes]
        for process in processes:
            process.kill()
        logs = [(folder / f"{name}.{rank}.log").read_text() for rank in range(RANKS)]
        found[name] = has_ended and not any(alive), [p.exitcode for p in processes], logs
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_failed_rank_ends_the_job_on_all_ranks(ended, name):
    failing_rank, fail, _, _ = ENDS[name]
    in_time, codes, logs = ended[name]
    assert in_time
    assert codes[1 - failing_rank] == 1
    assert f"rank {failing_rank} on {socket.gethostname()} " in logs[1 - failing_rank]
    if fail is raising:
        assert "a part of the machine is on fire" in logs[1 - failing_rank]


# Before there is an engine -----------------------------------------------------------------------

EARLY = {
    # When rank 1 fails: how, and what rank 0 is told, with {} for the host.
    "when it has joined": (killed, "has ended, for which rank 0 on {} waits: in load_pretrained()"),
    "while it loads": (raising, "rank 1 on {}: a part of the machine is on fire"),
    "before the weights": (leaves, "has ended, for which rank 0 on {} waits: in load_checkpoint()"),
    "before the engine": (leaves, "has ended, for which rank 0 on {} waits: making an engine"),
}


def fail_early(rank, folder, port, name):
    os.dup2(os.open(f"{folder}/{name}.{rank}.log", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    told_by_torchrun(rank, RANKS, port)

    def fail(when):
        if rank == 1 and name == when:
            EARLY[name][0]()

    def failing_before(function, when):
        original = getattr(pretrained, function)

        def call(*args, **kwargs):
            fail(when)
            return original(*args, **kwargs)

        return mock.patch.object(pretrained, function, call)

    with (
        failing_before("checked_folder", "while it loads"),
        failing_before("load_checkpoint", "before the weights"),
    ):
        initialize_distributed()
        dist.barrier()  # the others have joined, too, however busy the machine is
        fail("when it has joined")
        model, _ = pretrained.load_pretrained(folder, tensor_model_parallel_size=RANKS)
        fail("before the engine")
        make_engine(model)


@pytest.mark.parametrize("name", matrix_rows(EARLY, "when it has joined"))
def test_a_rank_that_fails_before_the_engine_ends_the_job(folder, name):
    processes = start_ranks(fail_early, RANKS, str(folder), free_port(), name)
    for process in processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    log = (folder / f"{name}.0.log").read_text()
    assert codes[0] == 1 and codes[1] is not None, log
    _, told = EARLY[name]
    assert told.format(socket.gethostname()) in log
