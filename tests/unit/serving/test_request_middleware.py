"""Who may call a server without keys, by Host and Origin."""

import pytest

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.request_middleware import Origins

OPEN = Origins(["models.example"], ["https://chat.example"])


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (None, None),
        ("127.0.0.1:8000", None),
        ("[::1]:8000", "http://[::1]:8000"),
        ("10.0.0.7", None),
        ("LOCALHOST:8000", "http://localhost:8000"),
        ("models.example", "https://models.example"),
        ("localhost:8000", "https://chat.example"),
    ],
)
def test_the_server_s_own_names_and_allowed_sites_pass(host, origin):
    OPEN.check(host, origin)


@pytest.mark.parametrize(
    ("host", "origin", "remedy"),
    [
        ("evil.example", "http://evil.example", "--allowed-host NAME"),  # DNS rebinding
        ("127.0.0.1.evil.example:8000", None, "--api-key"),
        ("[evil.example]", None, "--allowed-host"),
        ("localhost:8000", "http://evil.example", "--cors-origin http://evil.example"),
        ("localhost:8000", "http://localhost:3000", "--cors-origin http://localhost:3000"),
        ("localhost:8000", "null", "--api-key"),
        ("localhost:8000", "https://chat.example.evil", "--cors-origin"),
        (None, "http://evil.example", "--cors-origin"),
    ],
)
def test_pages_of_others_are_refused_with_what_to_set(host, origin, remedy):
    with pytest.raises(ApiError) as refused:
        OPEN.check(host, origin)
    assert refused.value.status == 403 and remedy in str(refused.value)


def test_all_sites_may_be_allowed():
    Origins(origins=["*"]).check("localhost", "null")
