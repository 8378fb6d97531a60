import pytest
from http_server import running_server


@pytest.fixture(scope="module")
def server():
    """A server of the demo model."""
    with running_server() as server:
        yield server
