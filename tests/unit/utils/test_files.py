"""Files are replaced as a whole, or not at all."""

import pytest

from megatron_hybrid.utils.files import replace_file


def test_replace_file_is_all_or_nothing(tmp_path):
    (tmp_path / "x").write_text("old")

    def fail(path):
        path.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_file(tmp_path / "x", fail)
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
