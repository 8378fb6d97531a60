"""The ranks of a server: which layouts there are, and how their processes start and end."""

import os
import signal
import socket
import threading

import psutil
import pytest
import torch
from waiting import wait_until

from megatron_hybrid.cli import main
from megatron_hybrid.serving import launch as launching
from megatron_hybrid.serving.launch import check_layout, launch

RANK = "import os, signal, sys, time; rank = int(os.environ['RANK']); "


def layout(**sizes):
    return {f"{name}_model_parallel_size": size for name, size in sizes.items()}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_a_layout_has_as_many_ranks_as_megatron_core_needs():
    assert check_layout("demo", layout(tensor=2, pipeline=5), "cpu") == 10
    assert check_layout("demo", layout(tensor=1), None) == 1


@pytest.mark.parametrize(
    ("sizes", "device", "message"),
    [
        (layout(tensor=3), "cpu", "num_attention_heads is 4, which does not divide evenly over"),
        (layout(pipeline=3), "cpu", "10 layers, which do not divide evenly over 3 pipeline stages"),
        (layout(expert=2), "cpu", "num_moe_experts must be non None"),
        (layout(tensor=2), "cuda:1", "there are 2 ranks: use cuda"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_starts(sizes, device, message):
    with pytest.raises(ValueError, match=message):
        check_layout("demo", sizes, device)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks on this machine need 2 GPUs, and it has 1"):
        check_layout("demo", layout(tensor=2), None)
    assert check_layout("demo", layout(tensor=2), "cpu") == 2


def test_a_job_of_another_size_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="needs 2 ranks, and WORLD_SIZE is 3: start it with torch"):
        check_layout("demo", layout(tensor=2), None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_layout("demo", layout(tensor=2), None) == 2


def test_the_command_starts_its_ranks_with_its_own_arguments(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launching, "launch", lambda *given: started.append(given) or 5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        arguments = ["serve", "demo", "--tp", "2", "--port"]
        assert main([*arguments, port]) == 2 and not started
        assert f"--port {port} cannot be used" in capsys.readouterr().err
    assert main([*arguments, port]) == 5
    assert started == [(["-m", "megatron_hybrid", *arguments, port], 2)]


def test_ranks_are_started_as_torchrun_starts_them(tmp_path):
    """And their launcher listens on loopback alone."""
    code = RANK + "import psutil; listens = [each.laddr.ip for each in "
    code += "psutil.Process(os.getppid()).net_connections() if each.status == 'LISTEN' and "
    code += "each.laddr.port == int(os.environ['MASTER_PORT'])]; "
    code += f"open('{tmp_path}/%d' % rank, 'w').write(' '.join(listens + list(map(os.environ.get, "
    code += "('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS')))))"
    assert launch(["-c", code], 2) == 0
    threads = max(1, torch.get_num_threads() // 2)
    written = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert written == [f"127.0.0.1 2 2 127.0.0.1 {threads}"] * 2


def test_the_rank_that_fails_is_named_and_ends_the_others(capfd):
    before = psutil.Process().children()
    assert launch(["-c", RANK + "sys.exit(7) if rank else time.sleep(60)"], 2) == 7
    assert "rank 1 (process" in (told := capfd.readouterr().err) and "has failed" in told
    assert launch(["-c", RANK + "rank or os.kill(os.getpid(), 9); time.sleep(60)"], 2) == 1
    told = capfd.readouterr().err
    assert "rank 0 (process" in told and "was ended by SIGKILL: the server has ended" in told
    assert psutil.Process().children() == before


@pytest.mark.parametrize(("handles", "number"), [(False, signal.SIGTERM), (True, signal.SIGHUP)])
def test_signals_are_passed_on_to_the_ranks(tmp_path, capfd, handles, number):
    """Ranks that start have no handlers yet. They hear of a closed terminal as of any other end."""
    code = RANK + f"signal.signal({number:d}, lambda *_: sys.exit(0)); " * handles
    code += f"open('{tmp_path}/%d' % rank, 'w'); time.sleep(60)"

    def end():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=end)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    assert launch(["-c", code], 2) == 0
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before and capfd.readouterr().err == ""
