"""Origins: which web pages may call the server where no API key keeps strangers out."""

import socket
from collections.abc import Iterable
from ipaddress import ip_address

from megatron_hybrid.serving.errors import ApiError


class Origins:
    """Checks the headers Host and Origin.

    A browser sends what a page of anybody asks for, also to a server that only this machine
    reaches. `Origin` names the page's site. A site that lets its own name point to this machine
    (DNS rebinding) has its name in `Host`: so names that nobody has allowed are refused, and
    addresses are not.

    Args:
        hosts: names of the server besides those of this machine.
        origins: sites whose pages may call it, such as "https://chat.example"; "*": all.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()):
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def check(self, host: str | None, origin: str | None) -> None:
        """host, origin: the headers; None: the request has none.

        Raises:
            ApiError: a foreign page, or a foreign name.
        """
        if host is not None and not self._is_own(host.lower()):
            raise ApiError(
                403,
                f"this server has no API key and is not called {host!r}: use its address, allow "
                "the name by --allowed-host NAME, or set --api-key",
            )
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        # A page of this server has its own host; that has just been checked.
        if host is not None and origin.lower().partition("://")[2] == host.lower():
            return
        raise ApiError(
            403,
            f"this server has no API key, and a page of {origin!r} may not call it: allow it by "
            f"--cors-origin {origin}, or set --api-key",
        )

    def _is_own(self, host: str) -> bool:
        name = host.partition("]")[0].removeprefix("[") if "[" in host else host.partition(":")[0]
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True
