"""Updates of the weights in parts: from a folder, from a trainer's group, from handles of CUDA."""

import base64
import os
import pickle
import re
import threading
import time
from unittest import mock

import pytest
import torch
from commands import free_port
from reference import finish, fresh_model, greedy, random_tokens, tiny_engine
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from waiting import wait_until

from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.inference.weights import transfer
from megatron_hybrid.inference.weights.transfer import GroupInfo, TrainerError, WeightGroup, part_of
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError

PROMPT = random_tokens(100)
LOGGED = greedy(5, return_log_probs=True, skip_prompt_log_probs=True)
PATTERN = "M*-"
OUTPUT = "output_layer.weight"


def row(result):
    return result.token_ids, result.log_probs, result.prefix.skipped_tokens


def answer(engine):
    return row(engine.generate([PROMPT], LOGGED)[0])


class TrainersGroup:
    """In place of a `WeightGroup`: what a trainer sends, in order. None: it has left."""

    has_heads = True

    def __init__(self, tensors):
        self.left, self.has_failed = list(tensors), False

    def receive(self, name, like):
        sent = self.left.pop(0)
        if sent is None:
            self.has_failed = True
            raise TrainerError("the trainer's group has failed")
        return sent

    def skip(self, number):
        del self.left[:number]

    def close(self):
        self.left = []


def meet(engine, group):
    """The engine joins it as that of a trainer."""
    with mock.patch.object(transfer, "WeightGroup", lambda *_, **__: group):
        engine.init_weight_transfer_engine(MEETING)
    return group


def info_of(named):
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype) for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def weights_of(model):
    return [(name, tensor.detach()) for name, tensor in own_tensors(model).items()]


@pytest.fixture
def served():
    """An engine that has answered, and what one with other weights answers."""
    with tiny_engine(fresh_model(PATTERN, 1)) as other:
        expected = answer(other)
    engine = tiny_engine(fresh_model(PATTERN))
    with engine:
        first = answer(engine)
        assert first[:2] != expected[:2] and answer(engine)[2] == len(PROMPT)
        yield engine, first, expected


def test_an_update_of_parts_is_one_epoch_and_no_step_runs_inside(served):
    engine, first, expected = served
    request = engine.add_request(PROMPT, greedy(8))
    while request.num_generated < 3:
        engine.step()
    named = weights_of(fresh_model(PATTERN, 1))
    meet(engine, TrainersGroup(tensor for _, tensor in named))
    engine.start_weight_update()
    for start in range(0, len(named), 3):
        with pytest.raises(RuntimeError, match=r"is under way: call finish_weight_update\(\)"):
            engine.step()
        engine.receive_weights(info_of(named[start : start + 3]))
    assert engine.awaits_weights
    engine.finish_weight_update()
    while not request.done:
        engine.step()
    assert request.result().epochs == [(0, 0), (1, 3)]
    assert request.token_ids[:3] == first[0][:3]
    finish(engine)
    engine.clear_cache()
    assert answer(engine) == expected and engine.epoch == 1


@pytest.mark.parametrize("has_heads", [True, False])
@pytest.mark.parametrize("why", ["no update", "asleep"])
def test_a_part_that_is_refused_does_not_shift_the_next_one(served, why, has_heads):
    engine, _, expected = served
    named = weights_of(fresh_model(PATTERN, 1))
    tensors = [tensor for _, tensor in named]
    group = meet(engine, TrainersGroup([*tensors[:3], *tensors]))
    group.has_heads = has_heads
    if why == "asleep":
        engine.suspend()
        engine.release_weights()
    with pytest.raises(RuntimeError) as raised:
        engine.receive_weights(info_of(named[:3]))
    if why == "asleep":
        engine.reacquire_weights()
        engine.resume()
    assert ("init_weight_transfer_engine() again" in str(raised.value)) == (not has_heads)
    if not has_heads:
        assert not group.left  # it was closed
        meet(engine, TrainersGroup(tensors))
    with pytest.raises(RuntimeError, match="needs an update"):
        engine.receive_weights({"path": "/nowhere"})  # which the trainer sends nothing for
    engine.start_weight_update()
    engine.receive_weights(info_of(named))
    engine.finish_weight_update()
    assert answer(engine) == expected


@pytest.mark.parametrize(
    "failure",
    ["a mistake", "the trainer leaves", "a new start", "another trainer", "a load", "no update"],
)
def test_half_an_update_is_never_used(served, failure):
    engine, _, expected = served
    named = weights_of(fresh_model(PATTERN, 1))
    tensors = [tensor for _, tensor in named]
    group = meet(engine, TrainersGroup([*tensors[:2], None]))
    engine.start_weight_update()
    engine.receive_weights(info_of(named[:1]))
    if failure == "a mistake":
        with pytest.raises(CheckpointError, match="no tensor wrong"):
            engine.receive_weights(info_of([("wrong", tensors[1])]))
        assert group.left == [None]  # what the trainer sends is taken all the same
    elif failure == "the trainer leaves":
        with pytest.raises(TrainerError, match="has failed"):
            engine.receive_weights(info_of(named[1:3]))
        with pytest.raises(RuntimeError, match="needs an update"):
            engine.receive_weights(info_of(named[:1]))
    elif failure == "another trainer":
        meet(engine, TrainersGroup([]))
        with pytest.raises(RuntimeError, match="needs an update"):
            engine.receive_weights(info_of(named[:1]))
        with pytest.raises(WeightsUnfinishedError, match="another trainer has come"):
            engine.step()
    elif failure == "a load":
        engine.load_weights(named[1:2])
        with pytest.raises(WeightsUnfinishedError, match="begun anew before its end"):
            engine.step()
    with pytest.raises(WeightsUnfinishedError, match=r"not those of one model|is under way"):
        engine.step()
    if failure == "no update":  # but a word of the caller's
        engine.update_weights()
        assert engine.epoch == 1 and answer(engine)[2] == 0
        return
    meet(engine, TrainersGroup(tensors[1:] + tensors[:1]))
    engine.start_weight_update()
    engine.receive_weights(info_of(named[1:]))
    with pytest.raises(CheckpointError, match=f"{named[0][0]}.* was not sent"):
        engine.finish_weight_update()
    engine.receive_weights(info_of(named[:1]))
    engine.finish_weight_update()
    assert answer(engine) == expected and engine.epoch == 1


# What is refused ----------------------------------------------------------------------------------


def pickled(value):
    return base64.b64encode(pickle.dumps(value)).decode()


ONE = {"names": [OUTPUT], "dtype_names": ["torch.float32"], "shapes": [[97, 32]]}
ARGUMENTS = (torch.Tensor, torch.Size([97, 32]), (32, 1), 0, torch.UntypedStorage, torch.float32)


def handle(*arguments, size=12416):
    return rebuild_cuda_tensor, (*arguments, 0, b"handle", size, 0, False, b"", 0, b"", True)


HANDLE = handle(*ARGUMENTS)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/evil",)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (3, "update_info is an object with names, dtype_names, shapes"),
        ({"names": []}, "update_info lacks dtype_names, shapes"),
        ({**ONE, "colour": 1}, "update_info has 'colour', which is not known"),
        ({**ONE, "names": "a"}, "update_info.names is a list"),
        ({**ONE, "names": []}, "has 0 names, 1 dtype_names, 1 shapes"),
        ({**ONE, "dtype_names": ["float33"]}, f"'float33', of {OUTPUT}, is no dtype"),
        ({**ONE, "names": [3]}, "update_info.names has 3, which is no text"),
        ({**ONE, "shapes": [[-1]]}, r"\[-1\] is no shape"),
        ({**ONE, "shapes": [[2**70]]}, r"\[1180591620717411303424\], of .*, has more elements"),
        ({**ONE, "shapes": [[2**40, 0, 2**40]]}, "has more elements than memory can hold"),
        ({**ONE, "packed": True}, "sent one by one here, leave packed out"),
        (ONE, "no trainer's group was joined: call init_weight_transfer_engine"),
        ({"path": "relative"}, "is 'relative'; it is the absolute path"),
        ({"path": "/nowhere"}, "is '/nowhere'; it is the absolute path"),
        ({"path": "/tmp", "names": []}, "update_info has 'names'"),
        ({**ONE, "ipc_handles_pickled": 3}, "no pickled list in base64"),
        ({**ONE, "ipc_handles_pickled": "????"}, "no pickled list in base64"),
        ({**ONE, "ipc_handles_pickled": pickled(Evil())}, "has posix.system, which is no part"),
        ({**ONE, "ipc_handles_pickled": pickled([3])}, "is no list of {GPU"),
        ({**ONE, "ipc_handles_pickled": pickled([{"a": (torch.Size, ())}])}, "is no list of {GPU"),
        ({**ONE, "ipc_handles_pickled": pickled([])}, "1 names and 0 handles"),
        (
            {**ONE, "ipc_handles_pickled": pickled([{"GPU": HANDLE}])},
            "the model is on cpu, and memory is shared by CUDA IPC handles on a GPU alone",
        ),
    ],
)
def test_what_is_no_part_is_refused(info, message):
    with pytest.raises(ValueError, match=message):
        part_of(info, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (HANDLE, None),
        ((rebuild_cuda_tensor, ARGUMENTS), "has a handle of 6 parts"),
        (handle(*ARGUMENTS[:5], torch.bfloat16), r"is torch.bfloat16 \[97, 32\] in shared memory"),
        (handle(torch.Tensor, torch.Size([96, 32]), *ARGUMENTS[2:]), r"float32 \[96, 32\] in"),
        (handle(*ARGUMENTS, size=12412), "needs 3104 elements of shared memory, .* has 3103"),
    ],
)
def test_handles_are_those_of_what_was_announced(made, message, monkeypatch):
    """As far as it goes without a GPU: what is unpickled is what torch makes there."""
    monkeypatch.setattr(transfer, "_uuid_of", lambda device: "GPU-1")
    for gpu in ("GPU-1", "GPU-2"):
        info = {**ONE, "ipc_handles_pickled": pickled([{gpu: made}])}
        expected = message if gpu == "GPU-1" else "has no handle for the GPU GPU-1, only for GPU-2"
        if expected is None:
            part = part_of(info, None, torch.device("cuda"))
            assert [(name, head.shape) for name, head in part.heads] == [(OUTPUT, (97, 32))]
        else:
            with pytest.raises(ValueError, match=expected):
                part_of(info, None, torch.device("cuda"))


MEETING = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master_port": 70000}, "init_info.master_port is 70000"),
        ({"rank_offset": "x"}, "init_info.rank_offset is 'x'"),
        ({"master_address": 3}, "init_info.master_address is 3; it must be text"),
        ({"rank_offset": 2}, "rank 2 is outside of a group of 2 processes"),
        ({"backend": "mpi"}, "backend is 'mpi'; use 'gloo' or 'nccl'"),
        ({"backend": "nccl"}, "the model is on cpu: use 'gloo'"),
    ],
)
def test_what_is_no_meeting_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GroupInfo.parse({**MEETING, **change}).check(1, torch.device("cpu"))
    with pytest.raises(ValueError, match="init_info lacks world_size"):
        GroupInfo.parse({k: v for k, v in MEETING.items() if k != "world_size"})


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_a_trainer_that_does_not_come_is_told(served, address, monkeypatch):
    engine, first, _ = served
    monkeypatch.setattr(transfer, "JOIN_SECONDS", 0.0)
    message = rf"^the group 'weights' at {address}:\d+ has not met: \[Errno -?\d+\] "
    with pytest.raises(TrainerError, match=message):
        there = {"master_port": free_port(), "master_address": address}
        engine.init_weight_transfer_engine({**MEETING, **there})
    assert answer(engine)[:2] == first[:2] and engine.weights._joining is None


@pytest.mark.parametrize("how", ["cancelled", "another", "closed", "ending"])
def test_a_group_that_arrives_too_late_is_closed(served, how, monkeypatch):
    engine, *_ = served
    late, next_one = TrainersGroup([1]), TrainersGroup([1])
    groups, comes = [late, next_one], threading.Event()

    def join(*_, **__):
        mine = groups.pop(0)
        comes.wait()
        return mine

    monkeypatch.setattr(transfer, "WeightGroup", join)
    joining = engine.weights.begin_join(MEETING)
    wait_until(lambda: len(groups) == 1)
    if how == "cancelled":
        engine.weights.cancel_join()
    elif how == "another":
        other = engine.weights.begin_join(MEETING)
    elif how == "closed":
        engine.close()
    else:
        engine.weights.end_waits()
    with pytest.raises(RuntimeError, match=r"has ended, or another|closed engine|the engine ends"):
        engine.weights.end_join(joining.number)
    comes.set()
    wait_until(lambda: not late.left)
    if how == "another":
        wait_until(lambda: engine.weights.end_join(other.number))
        assert engine.weights._group is next_one


def test_threads_of_a_trainer_send_each_head_with_its_tensor(monkeypatch):
    group = WeightGroup("127.0.0.1", free_port(), 0, 1)
    sent, both = [], threading.Barrier(2)

    def record(tensor):
        sent.append((threading.get_ident(), len(tensor)))
        time.sleep(0)  # another thread may run
        return tensor

    monkeypatch.setattr(group, "_broadcast", record)

    def send():
        both.wait()
        for _ in range(200):
            group.broadcast(torch.zeros(3))

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group.close()
    assert len(sent) == 800
    for head, tensor in zip(sent[::2], sent[1::2]):
        assert head[0] == tensor[0] and (head[1], tensor[1]) == (256, 12)
