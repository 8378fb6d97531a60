"""Set-up of every test run."""

import asyncio
import gc
import inspect
import os

# Threads that wait leave the core to others, on which tests may run beside this one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The models are tiny: a second thread costs more in hand-overs than it brings, in children, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from waiting import LIMIT_S

# How long an example takes says how busy the machine is.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# Two ranks under torchrun collect it; alone it would wait for the other one.
collect_ignore = [] if os.environ.get("WORLD_SIZE") == "2" else ["functional/test_two_gpus.py"]

torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` a module that does not name the mark is not imported: it may need a library
    that GPU machines lack, and tests/kernels chooses Triton's interpreter for the whole process."""
    if config.option.markexpr != "gpu":
        return None
    inside = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(b"pytest.mark.gpu" in path.read_bytes() for path in inside) else True


def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine runs in a loop of its own; a limit of time ends what hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, LIMIT_S))
    return True


def pytest_collection_finish():
    """What imports and collection made stays to the end: full collections leave it out."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def default_group():
    """A default process group of torch, with this process alone."""
    if dist.is_initialized():  # another test has left it
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def core_groups(default_group):
    """Megatron-core's groups, over the default one."""
    from megatron.core import parallel_state  # where it is installed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
