"""`pytest tests/functional/huggingface --models-table` writes docs/reference/models.md's tables."""

import pytest
from huggingface import config_names
from models_table import TABLE, merge_rows, write_released
from test_hub_configs import FOLDER

_ROWS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--models-table", action="store_true", help="write the table of models")


def pytest_collection_modifyitems(config, items):
    """What is compared with the table waits until it has been written."""
    if config.getoption("--models-table"):
        items[:] = [item for item in items if "in_the_docs" not in item.name]


@pytest.fixture
def record_row(request):
    """Keeps a row of the table."""
    return request.config.stash.setdefault(_ROWS, []).append


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--models-table") and exitstatus == 0:
        merge_rows(TABLE, session.config.stash.get(_ROWS, []), config_names())
        write_released(TABLE, FOLDER)
