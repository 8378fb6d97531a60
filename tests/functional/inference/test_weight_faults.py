"""Faults of new weights, by path and layout: the error, what the engine does next, and that a full
update brings the new model's bits. Both ranks of a row share one process for all rows."""

import base64
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from commands import free_port
from rank_processes import join_ranks, run_ranks
from reference import greedy, random_tokens, tiny_engine, tiny_model
from safetensors.torch import load_file, save_file
from split_models import load, save_old_and_new
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from waiting import wait_until

from megatron_hybrid.compat import parallel_state
from megatron_hybrid.distributed import ranks
from megatron_hybrid.distributed.ranks import RankError
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.weights import transfer
from megatron_hybrid.inference.weights.transfer import TrainerError, WeightGroup
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.tools.quantize import quantize
from megatron_hybrid.training.lora import (
    LoraFields,
    add_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)

RANKS = 2
MODEL = dict(layer_pattern="M*|E-", mamba_num_groups=2, num_moe_experts=4, moe_router_topk=2)
LAYOUTS = {
    "TP": dict(tensor_model_parallel_size=2),
    "PP": dict(pipeline_model_parallel_size=2),
    "EP": dict(expert_model_parallel_size=2),
    "one": {},  # two replicas, each of one rank
    "packed": dict(tensor_model_parallel_size=2),  # weights of 8 bits
}
GPU = "GPU-1"
CONFIG = dict(cache_bytes=1 << 20, max_requests=2, max_sequence_length=96, verify_ranks=True)
PROMPT = random_tokens(40)
LOGGED = greedy(3, return_log_probs=True, skip_prompt_log_probs=True)
LAST = "decoder.layers.3.mlp.linear_fc2.weight"  # of the last stage
DIFFER = "the ranks have different weights: rank 0 on .* has "


@dataclass(frozen=True)
class Row:
    """A fault.

    Args:
        name: the path, and the fault.
        fault: makes it, on each rank.
        error: what all ranks raise.
        marks: words. `writes`: something is written before it; `several`: it is one between ranks;
            `often`: it runs in `make test`; `packed`: it is one of packed weights; `raw`: its
            trainer uses torch alone; `leaves`: the trainer's group ends.
        sent: for a trainer: what it sends, of the new weights; None: nothing.
    """

    name: str
    fault: Callable
    error: str
    marks: str = ""
    sent: Callable | None = None

    def has(self, mark: str) -> bool:
        return mark in self.marks.split()


@dataclass
class Job:
    """What a fault may use."""

    engine: DynamicInferenceEngine
    rank: int
    new: dict[str, torch.Tensor]
    folder: str

    @property
    def is_second(self) -> bool:
        """Whether the fault is made here, if one rank makes it. With one rank each does."""
        return self.rank == 1 or self.engine.ranks.size == 1

    def receive(self, *infos) -> None:
        """An update of parts, in order."""
        self.engine.start_weight_update()
        for info in infos:
            self.engine.receive_weights(info)
        self.engine.finish_weight_update()

    def announce(self, **fields) -> None:
        """Receive all tensors, which a trainer sends."""
        self.receive({**info_of(self.new), **fields})

    def share(self, pairs, change=lambda handles: handles, freed=None) -> None:
        """Receive all tensors from a trainer on the same GPU. change: of its handles. freed: number
        of a tensor that is not there any more."""
        tensors = [tensor for _, tensor in pairs]
        handles = change([{GPU: handle(n, tensor)} for n, tensor in enumerate(tensors)])
        pickled = base64.b64encode(pickle.dumps(handles)).decode()
        if freed is not None:
            tensors[freed] = None
        with gpu_of(self.engine, tensors):
            self.announce(ipc_handles_pickled=pickled)

    def lead(self, load: Callable) -> None:
        """Let the first rank alone call."""
        if self.rank and self.engine.ranks.size > 1:
            self.engine.follow()
            raise RankError(LEADER_HAS_IT)
        with self.engine.lead():
            load()


RAISED = KeyboardInterrupt, SystemExit
LEADER_HAS_IT = "the leading rank has the error"


def handle(number, tensor):
    """What torch's `reduce_tensor` makes of a tensor on a GPU; its handle is a number."""
    where = torch.UntypedStorage, tensor.dtype, 0, str(number).encode(), tensor.nbytes
    end = 0, False, b"", 0, b"", True
    return rebuild_cuda_tensor, (
        torch.Tensor,
        tensor.shape,
        tensor.stride(),
        0,
        *where,
        *end,
    )


@contextmanager
def gpu_of(engine, tensors):
    """A GPU that the engine and a trainer share, as far as it goes without one: tensors are found
    by their handles. None: that handle has no memory."""

    def rebuild(*arguments):
        if (tensor := tensors[int(arguments[7])]) is None:
            raise RuntimeError("invalid device context")
        return tensor

    name = "torch.multiprocessing.reductions", "rebuild_cuda_tensor"
    with ExitStack() as patches:
        for patch in (
            mock.patch.object(transfer, "_uuid_of", lambda device: GPU),
            mock.patch.object(transfer, "rebuild_cuda_tensor", rebuild),
            mock.patch.dict(transfer._HARMLESS, {name: rebuild}),
            mock.patch.object(torch.cuda, "synchronize"),
            mock.patch.object(engine.weights, "_device", torch.device("cuda", 0)),
        ):
            patches.enter_context(patch)
        yield


def info_of(named):
    return {
        "names": list(named),
        "dtype_names": [str(tensor.dtype) for tensor in named.values()],
        "shapes": [list(tensor.shape) for tensor in named.values()],
    }


def half(named):
    return list(named.items())[: len(named) // 2]


def raises_after(pairs, error=OSError):
    yield from pairs
    raise error("the trainer is gone")


def at(named, index, value):
    """The weights, with another tensor at a place."""
    pairs = list(named.items())
    pairs[index] = pairs[index][0], value(pairs[index][1])
    return pairs


def second_has(job, change):
    return change(job.new) if job.is_second else job.new


def swapped(named):
    """Two tensors of the same shape and dtype in each other's place."""
    pairs = list(named.items())
    shapes = [(tensor.shape, tensor.dtype) for _, tensor in pairs]
    i, j = next((i, j) for j in range(len(pairs)) for i in range(j) if shapes[i] == shapes[j])
    pairs[i], pairs[j] = pairs[j], pairs[i]
    return pairs


def negated(new):
    return dict(at(new, 3, torch.neg))


def list_rows():
    def row(name, given, error, marks=""):
        return Row(f"list: {name}", lambda job: job.engine.load_weights(given(job)), error, marks)

    fewer = lambda job: second_has(job, lambda new: dict(list(new.items())[1:]))  # noqa: E731
    other = lambda job: second_has(job, negated)  # noqa: E731
    wrong = lambda job: {**job.new, LAST: torch.zeros(3, 3)}  # noqa: E731
    yield row("a rank lacks one", fewer, DIFFER + "embedding.*, rank 1 on .* has ", "several often")
    yield row("other values", other, DIFFER + ".* with the hash ", "several often")
    yield row("a wrong shape", wrong, f"{LAST} has shape")


def stream_rows():
    def row(name, given, error, marks):
        """given: to the second rank, of the new weights; the first one gets all."""

        def fault(job):
            job.engine.load_weights(iter(given(job.new) if job.is_second else job.new.items()))

        return Row(f"stream: {name}", fault, error, marks)

    raising = lambda new: raises_after(half(new))  # noqa: E731
    exiting = lambda new: raises_after(half(new), SystemExit)  # noqa: E731
    gone, early = "the trainer is gone", DIFFER + ".*, rank 1 on .* has nothing more"
    yield row("it raises half way", raising, f"OSError: {gone}|^{gone}", "writes often")
    yield row("it exits half way", exiting, f"SystemExit: {gone}|^{gone}", "writes")
    yield row("it ends early", half, early, "writes several often")
    yield row("other values", lambda new: negated(new).items(), DIFFER, "writes several")


def led_rows():
    for name, error in (
        ("raises half way", OSError),
        ("half way has KeyboardInterrupt", KeyboardInterrupt),
    ):
        stream = lambda job, error=error: raises_after(half(job.new), error)  # noqa: E731
        yield Row(
            f"led: a stream {name}",
            lambda job, stream=stream: job.lead(lambda: job.engine.load_weights(stream(job))),
            f"the trainer is gone|{LEADER_HAS_IT}",
            "writes often",
        )


def folder_rows():
    def row(name, folders, error, marks=""):
        """folders: received in turn."""
        fault = lambda job: job.receive(*({"path": path} for path in folders(job)))  # noqa: E731
        return Row(f"folder: {name}", fault, error, marks)

    nowhere = "update_info.path is '/nowhere'"
    new = lambda job: f"{job.folder}/new"  # noqa: E731
    lacking = lambda job: ["/nowhere" if job.is_second else new(job)]  # noqa: E731
    other = lambda job: [f"{job.folder}/old" if job.rank else new(job)]  # noqa: E731
    yield row("no such folder", lambda job: ["/nowhere"], nowhere, "often")
    yield row("it is missing on a rank", lacking, nowhere)
    # Of tensors that are equal in both, such as norms, some are written.
    yield row("another one on a rank", other, DIFFER, "writes several")
    yield row(
        "a mistake in a later part", lambda job: [new(job), "/nowhere"], nowhere, "writes often"
    )


def adapter_rows():
    for name, first, second, error, marks in (
        ("of another model", "other", "other", "of another model", ""),
        ("another factor on a rank", "some", "more", "the adapters' fields.* rank 1 on", "several"),
        ("other values on a rank", "some", "rest", "the adapters differs .* rank 1 on", "several"),
        ("missing on a rank", "some", "none", "has no adapters to read", ""),
    ):
        yield Row(
            f"adapters: {name}",
            lambda job, first=first, second=second: load_adapters(
                job.engine.model, f"{job.folder}/adapters-{second if job.is_second else first}"
            ),
            error,
            marks,
        )
    yield Row(
        "adapters: another call on a rank",
        lambda job: (
            merge_adapters(job.engine.model)
            if job.rank
            else load_adapters(job.engine.model, f"{job.folder}/adapters-some")
        ),
        r"rank 0 on .* is load_adapters\(\), rank 1 on .* is merge_adapters\(\)",
        "several often",
    )
    yield Row(
        "adapters: one rank alone",
        load_alone,
        r"rank 1 on .* is load_adapters\(\), and rank 0 on .* did not come|does not call",
        "several",
    )


def load_alone(job):
    if job.rank == 0:
        raise RankError("rank 0 does not call it")
    with mock.patch.object(ranks.ranks_of, "__defaults__", (0.5, ranks.MAKING)):
        load_adapters(job.engine.model, f"{job.folder}/adapters-some")


def shared_rows():
    """Rows of memory that a trainer shares by CUDA IPC."""
    everything = lambda job: list(job.new.items())  # noqa: E731
    yield Row(
        "shared: none for the GPU of a rank",
        lambda job: job.share(
            everything(job),
            lambda handles: (
                [{"GPU-2": each[GPU]} for each in handles] if job.is_second else handles
            ),
        ),
        "has no handle for the GPU GPU-1, only for GPU-2",
    )
    yield Row(
        "shared: other values on a rank",
        lambda job: job.share(second_has(job, negated).items()),
        DIFFER,
        "writes several",
    )
    yield Row(
        "shared: the trainer has freed one",
        lambda job: job.share(everything(job), freed=4),
        "cannot be read from shared memory",
        "writes often",
    )


def packed_rows():
    """Rows of a model with packed weights, and folders of such weights."""
    for name, first, second, error, marks in (
        ("of another format", "fp8", "fp8", "is packed .* but packed .* in the model", "packed"),
        ("NaN", "nan", "nan", "NaN", "packed"),
        ("missing on a rank", "int8", "none", "update_info.path is", "packed"),
        ("another one on a rank", "int8", "int8 of old", DIFFER, "packed several"),
    ):
        yield Row(
            f"packed: {name}",
            lambda job, first=first, second=second: job.receive(
                {"path": f"{job.folder}/{second if job.is_second else first}"}
            ),
            error,
            marks,
        )
    yield Row(
        "packed: a mistake in a later part",
        lambda job: job.receive({"path": f"{job.folder}/int8"}, {"path": "/nowhere"}),
        "update_info.path is '/nowhere'",
        "writes packed",
    )
    yield Row(
        "folder: a packed one",
        lambda job: job.receive({"path": f"{job.folder}/int8"}),
        "is packed .* but not packed in the model",
    )


def sent_rows(is_raw):
    """Rows of a trainer that sends tensors, by our class or by torch alone."""
    kind = "raw" if is_raw else "sent"

    def row(name, sent, error, marks="", announced=lambda new: {}):
        fault = lambda job: job.announce(**announced(job.new))  # noqa: E731
        return Row(f"{kind}: {name}", fault, error, f"{kind} {marks}", sent)

    fewer, more = "fewer bytes than the", "more bytes than the"
    if not is_raw:
        fewer = more = "and was announced as torch.float32"
    everything = lambda new: list(new.items())  # noqa: E731
    half_of = lambda place: lambda new: at(new, place, torch.Tensor.bfloat16)  # noqa: E731
    twice = lambda new: at(new, 4, lambda t: torch.cat([t, t]))  # noqa: E731
    wrong_name = lambda new: {"names": ["wrong", *list(new)[1:]]}  # noqa: E731
    wrong_dtype = lambda new: {"dtype_names": ["fp32"] * len(new)}  # noqa: E731
    ends = "leaves often" if is_raw else ""
    yield row("bf16 as fp32 at first", half_of(0), fewer, "often")
    yield row("bf16 as fp32 later", half_of(4), fewer, "writes often")
    yield row("twice as long", twice, more, "writes")
    yield row("an unknown name", everything, "no tensor wrong", "", wrong_name)
    yield row("an unknown dtype", everything, "'fp32', of .*, is no dtype", ends, wrong_dtype)
    if not is_raw:
        yield row("another order", swapped, "and another tensor was sent", "writes")
    yield row("the trainer leaves", half, "trainer|Connection", "writes leaves")


ROWS = [*list_rows(), *stream_rows(), *led_rows(), *folder_rows(), *adapter_rows()]
ROWS += [*shared_rows(), *packed_rows()]
ROWS += [*sent_rows(is_raw=False), *sent_rows(is_raw=True)]


# Processes ----------------------------------------------------------------------------------------


class RawGroup:
    """A trainer's end of a group, made as RL stacks do, by torch alone."""

    def __init__(self, port):
        seconds = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, 1 + RANKS, is_master=True, timeout=seconds)
        self.group, _ = distributed_c10d._new_process_group_helper(
            1 + RANKS, 0, [], "gloo", dist.PrefixStore("weights", store), "weights", timeout=seconds
        )
        distributed_c10d._world.pg_group_ranks[self.group] = {i: i for i in range(1 + RANKS)}
        self._store = store

    def broadcast(self, tensor, name):
        dist.broadcast(tensor.contiguous(), 0, group=self.group)

    def close(self):
        dist.destroy_process_group(self.group)
        self._store = None


def groups_of(rows):
    """Which rows begin with a new group."""
    before = None
    for row in rows:
        yield row, row.sent is not None and before != row.has("raw")
        if row.sent is not None:
            before = None if row.has("leaves") else row.has("raw")


def tell_port(folder, name):
    """A free port, for the other ranks."""
    port = free_port()
    (folder / f"{name}.new").write_text(str(port))
    (folder / f"{name}.new").rename(folder / name)
    return port


def told_port(folder, name):
    wait_until((folder / name).exists)
    return int((folder / name).read_text())


def run_trainer(rows, new, folder, layout):
    group = None
    for row, begins in groups_of(rows):
        if row.sent is None:
            continue
        if begins:
            if group is not None:
                group.close()
            port = tell_port(folder, f"port of {layout}, {row.name.replace(':', '')}")
            group = (
                RawGroup(port) if row.has("raw") else WeightGroup("127.0.0.1", port, 0, 1 + RANKS)
            )
        with suppress(RuntimeError) if row.has("leaves") else nullcontext():
            for name, tensor in row.sent(new):
                group.broadcast(tensor, name)
        if row.has("leaves"):
            group.close()
            group = None
        else:  # the next full update comes through the same group
            for name, tensor in new.items():
                group.broadcast(tensor, name)
    if group is not None:
        group.close()
    group = WeightGroup("127.0.0.1", tell_port(folder, f"silence in {layout}"), 0, 1 + RANKS)
    for rank in range(RANKS):
        wait_until((folder / f"end of {layout} on {rank}").exists)
    group.close()


def answer(engine):
    result = engine.generate([PROMPT], LOGGED)[0]
    return result.token_ids, result.log_probs


def recover(job, row, number):
    """A full update, by each way in turn."""
    if row.sent is not None and not row.has("leaves"):
        job.announce()
    elif number % 3 == 0:
        job.receive({"path": f"{job.folder}/new"})
    else:
        job.engine.load_weights(job.new if number % 3 == 1 else iter(job.new.items()))


def run_row(job, row, number, old, bits):
    engine = job.engine
    engine.load_weights(old)
    assert answer(engine) == bits["old"]
    epoch = engine.epoch
    kinds = ValueError, RankError, OSError, TypeError, TrainerError, *RAISED
    with pytest.raises(kinds) as raised:
        row.fault(job)
    assert re.search(row.error, str(raised.value)), str(raised.value)
    if row.has("writes"):
        with pytest.raises(WeightsUnfinishedError, match="send these once more, or the whole") as e:
            answer(engine)
        assert engine.weights_failure == str(e.value) and not engine.has_work
    else:
        assert not engine.awaits_weights and engine.epoch == epoch
        assert answer(engine) == bits["old"]
    recover(job, row, number)
    assert not engine.awaits_weights and engine.epoch == epoch + 1
    assert answer(engine) == bits["new"]


def meet(engine, meeting):
    """Join the trainer's group; requests are answered meanwhile."""
    joining = engine.weights.begin_join(meeting)
    answer(engine)
    while not engine.weights.end_join(joining.number):
        joining.wait()


def end_a_wait(job):
    """The first rank ends, where the trainer sends nothing: no rank waits for it any more."""
    job.engine.start_weight_update()
    if job.engine.ranks.is_first:
        threading.Timer(0.2, job.engine.weights.end_waits).start()
    with pytest.raises(TrainerError, match="nobody here waits for it any more"):
        job.engine.receive_weights(info_of(job.new))
    assert not job.engine.awaits_weights


def run_rank(rank, folder, layouts, is_whole):
    rows = [row for row in ROWS if is_whole or row.has("often")]
    old, new = torch.load(folder / "old.pt"), torch.load(folder / "new.pt")
    rows_of = {
        name: [
            row
            for row in rows
            if not (row.has("several") and name == "one")
            and row.has("packed") == (name == "packed")
        ]
        for name in layouts
    }
    if rank == RANKS:
        torch.set_num_threads(1)
        for name in layouts:
            run_trainer(rows_of[name], new, folder, name)
        return
    join_ranks(rank, RANKS, f"{folder}/rendezvous")
    for name in layouts:
        source = folder / ("int8" if name == "packed" else "old")
        model = load(source, **LAYOUTS[name])
        with tiny_engine(model.eval(), **CONFIG) as engine:
            job = Job(engine, rank, new, str(folder))
            engine.load_weights(old)
            bits = {"old": answer(engine)}
            engine.load_weights(new)
            bits["new"] = answer(engine)
            assert bits["old"] != bits["new"]
            offset = 1 if engine.ranks.size > 1 else 1 + rank
            meeting = {"rank_offset": offset, "world_size": 1 + RANKS}
            for number, (row, begins) in enumerate(groups_of(rows_of[name])):
                try:
                    if begins:
                        port = told_port(folder, f"port of {name}, {row.name.replace(':', '')}")
                        meeting |= {"master_address": "127.0.0.1", "master_port": port}
                        meet(engine, meeting)
                    run_row(job, row, number, old, bits)
                except BaseException as error:
                    text = f"{name}, {row.name}: {type(error).__name__}: {error}"
                    raise AssertionError(text) from error
            port = told_port(folder, f"silence in {name}")
            meet(engine, meeting | {"master_address": "127.0.0.1", "master_port": port})
            end_a_wait(job)
            assert answer(engine) == bits["new"]
            engine.check_integrity()
        (folder / f"end of {name} on {rank}").touch()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layouts", "is_whole"),
    [
        pytest.param(["TP"], False, id="some"),
        pytest.param([*LAYOUTS], True, id="all", marks=pytest.mark.matrix),
    ],
)
def test_after_a_fault_the_old_weights_answer_or_nothing_does(tmp_path, layouts, is_whole):
    save_old_and_new(tmp_path, **MODEL)
    if is_whole:
        for source, name in (("new", "int8"), ("old", "int8 of old"), ("new", "fp8")):
            quantize(tmp_path / source, tmp_path / name, name.partition(" ")[0])
        packed = load_file(tmp_path / "int8" / "model.safetensors")
        scale = next(tensor for name, tensor in packed.items() if name.endswith("scale"))
        scale[0] = torch.nan
        shutil.copytree(tmp_path / "int8", tmp_path / "nan")
        save_file(packed, tmp_path / "nan" / "model.safetensors", {"format": "pt"})
    for name, factor in (("some", 1.0), ("more", 2.0), ("rest", 1.0), ("other", 1.0)):
        fields = {**MODEL, "hidden_size": 96} if name == "other" else MODEL
        model = tiny_model.__wrapped__(**fields)
        add_adapters(model, LoraFields(rank=2, alpha=factor, targets=["in_proj"]))
        if name == "rest":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2 if parameter.requires_grad else 1)
        save_adapters(model, tmp_path / f"adapters-{name}")
    run_ranks(run_rank, (tmp_path, layouts, is_whole), RANKS + 1)
