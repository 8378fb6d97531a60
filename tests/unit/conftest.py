import signal

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, in whatever order tests run."""
    torch.manual_seed(1234)


@pytest.fixture
def interrupts():
    """Python's own, and afterwards what was there before; a shell starts what runs in the
    background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
