"""Faults of one rank of three, and how long it takes until all have ended.

    python tests/helpers/rank_faults.py

`make soak-ranks` runs it: half an hour. Words of an argument, such as "decode killed", choose rows.
Each has a fault, the rank that has it, whose calls count, the seconds from the fault until the
other ranks and until all ranks had ended, and whether all others wrote the name of the rank. No
launcher ends a process.
"""

import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from unittest import mock

import torch
from rank_processes import join_ranks, start_ranks
from reference import greedy, random_tokens, tiny_engine, tiny_model
from split_models import load

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.memory.cache_pool import CachePool

RANKS = 3
PATTERN = "M*|S-|W*"
LIMIT_SECONDS = 120.0
TIMEOUT = 5.0
"""`rank_timeout`, of which calls that are no step have ten times as much."""


def killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def frozen(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stuck(*_: object) -> None:
    time.sleep(10 * LIMIT_SECONDS)


def raising(*_: object) -> None:
    raise OSError("a part of the machine is on fire")


FAULTS = {
    # Fault: (seconds until the others have ended, at most; seconds until all have).
    killed: (7.0, 7.0),
    frozen: (30.0, 40.0),
    stuck: (TIMEOUT + 8.0, TIMEOUT + 12.0),
    raising: (7.0, 7.0),
}
MOMENTS = "making", "first step", "decode", "idle", "tokenizer", "save"


def rows() -> list[tuple]:
    """Moment, fault, rank, whether the first rank leads."""
    found = []
    for moment, fault, rank, leads in product(MOMENTS, FAULTS, range(RANKS), (False, True)):
        is_opportunistic = rank == 1 and (moment != "decode" or leads)  # as the last one
        is_own_code = moment in ("idle", "tokenizer") and fault is stuck  # may take any time
        never_comes = moment == "tokenizer" and leads
        goes_on = fault is raising and (moment == "idle" or (moment == "save" and leads))
        if not (is_opportunistic or is_own_code or never_comes or goes_on):
            found.append((moment, fault, rank, leads))
    return found


class Job:
    """One rank of a row, in its process."""

    def __init__(self, folder: str, number: int, rank: int):
        self.moment, self.fault, self.failing, self.leads = rows()[number]
        self.folder, self.name, self.rank = folder, f"{folder}/{number}", rank
        os.dup2(os.open(f"{self.name}.{rank}.log", os.O_CREAT | os.O_WRONLY), 2)

    def at(self, moment: str) -> None:
        """The fault, if this is its moment and its rank."""
        if self.moment == moment and self.rank == self.failing:
            Path(f"{self.name}.at").write_text(str(time.time()))
            self.fault()

    def run(self) -> None:
        join_ranks(self.rank, RANKS, f"{self.name}.rendezvous")
        model = load(self.folder, pipeline_model_parallel_size=RANKS)
        steps = iter(range(10**9))
        names = {0: "first step", 20: "decode"}
        model.eval().register_forward_pre_hook(lambda *_: self.at(names.get(next(steps), "")))
        fields = {"cache_dir": f"{self.name}.cache", "rank_timeout": TIMEOUT}
        before = CachePool.__init__
        with mock.patch.object(
            CachePool, "__init__", lambda *a, **k: (self.at("making"), before(*a, **k))[1]
        ):
            engine = tiny_engine(model, self, **fields)
        saves = engine.offload.save_to
        engine.offload.save_to = lambda *a: (self.at("save"), saves(*a))[1]
        if not self.leads:
            self.calls(engine)
        elif self.rank == 0:
            with engine.lead():
                self.calls(engine)
        else:
            if self.moment == "idle":
                threading.Timer(2.0, self.at, ["idle"]).start()
            engine.follow()

    def calls(self, engine: DynamicInferenceEngine) -> None:
        engine.generate([random_tokens(30)], greedy(40))
        if not self.leads or self.rank == 0:
            self.at("idle")
        if self.moment == "idle":
            time.sleep(5.0 if self.leads else 0.0)
        engine.generate(["a text"], greedy(4))
        engine.save_cache()

    # As a tokenizer

    eod = None

    def tokenize(self, text: str) -> list[int]:
        self.at("tokenizer")
        return random_tokens(20)

    def detokenize(self, ids: list[int]) -> str:
        return ""


def run_rank(rank: int, folder: str, number: int) -> None:
    Job(folder, number, rank).run()


def try_row(folder: str, number: int) -> tuple[float, float, bool]:
    """Seconds until the others and until all have ended, and whether the others wrote the name."""
    *_, failing, _ = rows()[number]
    processes = start_ranks(run_rank, RANKS, folder, number)
    at = Path(f"{folder}/{number}.at")
    limit = time.time() + LIMIT_SECONDS
    while not (at.exists() and at.read_text()) and time.time() < limit:
        time.sleep(0.01)
    began, ended = float(at.read_text()), [0.0] * RANKS
    while not all(ended) and time.time() < began + LIMIT_SECONDS:
        time.sleep(0.01)
        for rank, process in enumerate(processes):
            if not ended[rank] and not process.is_alive():
                ended[rank] = time.time() - began
    for process in processes:
        process.kill()
        process.join()
    ended = [seconds or float("inf") for seconds in ended]
    others = [rank for rank in range(RANKS) if rank != failing]
    logs = [Path(f"{folder}/{number}.{rank}.log").read_text() for rank in others]
    name = f"rank {failing} on {re.escape(socket.gethostname())}"
    return max(ended[r] for r in others), max(ended), all(re.search(name, log) for log in logs)


def main() -> None:
    torch.set_num_threads(1)
    numbers, failures = range(len(rows())), 0
    if len(sys.argv) > 1:
        numbers = [i for i in numbers if sys.argv[1] in f"{rows()[i][0]} {rows()[i][1].__name__}"]
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(tiny_model(layer_pattern=PATTERN.replace("|", "")), folder)
        for number in numbers:
            moment, fault, rank, leads = rows()[number]
            others, everyone, named = try_row(folder, number)
            more = 9 * TIMEOUT if fault is stuck and moment in ("making", "save") else 0.0
            most_others, most = (seconds + more for seconds in FAULTS[fault])
            is_right = others <= most_others and everyone <= most and named
            failures += not is_right
            if not named:
                for log in sorted(Path(folder).glob(f"{number}.*.log")):
                    print(log.name, *log.read_text().splitlines()[-3:], sep="\n    ")
            print(
                f"{fault.__name__:8} in {moment:10} rank {rank}  "
                f"{'rank 0 leads' if leads else 'all call    '}  others {others:5.1f} s  all "
                f"{everyone:5.1f} s  {'' if is_right else 'WRONG'}{'' if named else ', no name'}",
                flush=True,
            )
    print(f"{len(numbers)} faults, {failures} wrong")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
