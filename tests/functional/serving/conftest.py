import openai
import pytest
from http_server import running_server


@pytest.fixture(scope="module")
def server():
    """A server of the demo model."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """The `openai` package's."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
