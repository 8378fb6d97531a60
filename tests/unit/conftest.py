import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, in whatever order tests run."""
    torch.manual_seed(1234)
