"""Pickles of other releases of Python."""

import io
from pathlib import PosixPath

import pytest

from megatron_hybrid.checkpoints.megatron.pickles import load_pickle


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_all_releases_are_read(module):
    """Python 3.13 names the second one."""
    written = f"c{module}\nPosixPath\n(Va\nVb\ntR.".encode()
    assert load_pickle(io.BytesIO(written)) == PosixPath("a/b")
