"""Where processes of a job talk to each other."""

import os

import pytest
import torch.distributed as dist

from megatron_hybrid.models.sharding import parallel_setup
from megatron_hybrid.models.sharding.parallel_setup import initialize_distributed


@pytest.mark.parametrize("on_this_machine", [2, 1])
def test_ranks_on_one_machine_talk_over_loopback(on_this_machine, monkeypatch):
    interfaces = [f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL")]
    found = []
    for name in interfaces:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_machine))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr("atexit.register", lambda function: None)
    monkeypatch.setattr(parallel_setup, "job_store", lambda: (dist.HashStore(), 1, 2))
    monkeypatch.setattr(parallel_setup, "join", lambda *job: [])
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **job: found.extend(map(os.environ.get, interfaces)),
    )
    initialize_distributed()
    assert found == (["lo", "lo"] if on_this_machine == 2 else [None, None])
