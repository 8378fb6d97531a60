"""API keys: who may ask, and who shares cached prefixes."""

import hashlib
import hmac
from collections.abc import Mapping

from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.http.errors import ApiError


class Auth:
    """The API keys of a server."""

    def __init__(self, config: ServingConfig):
        self._config = config

    def key_of(self, headers: Mapping[str, str]) -> str:
        """Return the key of a request, "" where none is needed. Anthropic's clients send it in a
        header of its own.

        Raises:
            ApiError: the request has no key, or none of this server.
        """
        if not (self._config.api_keys or self._config.admin_keys):
            return ""
        authorization = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}")
        kind, _, given = authorization.partition(" ")
        found = self.known_key(given.strip())
        if kind.lower() != "bearer" or found is None:
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                None,
                "invalid_api_key",
            )
        return found

    def known_key(self, given: str) -> str | None:
        """Return the server's key that equals the given one, or None."""
        keys = (*self._config.api_keys, *self._config.admin_keys)
        # All are compared, each in constant time: the time reveals nothing about a key.
        asked = given.encode(errors="surrogatepass")
        found = [key for key in keys if hmac.compare_digest(key.encode(), asked)]
        return found[0] if found else None

    def check_admin(self, key: str) -> None:
        """Raise ApiError unless a key opens the operator's routes."""
        if self._config.admin_keys and key not in self._config.admin_keys:
            raise ApiError(403, "this route is the operator's: use the admin key")
        if len(self._config.api_keys) > 1 and not self._config.admin_keys:
            raise ApiError(
                403,
                "with several API keys this route needs an admin key: start with --admin-key, or "
                "set MEGATRON_HYBRID_ADMIN_KEYS",
            )

    def salt_of(self, key: str, salt: str | None) -> str:
        """Return the salt of cached prefixes: the request's, and the tenant if keys are apart."""
        if "\0" in (salt or ""):
            raise ApiError(400, f"cache_salt is {salt!r:.80}: leave out its NUL", "cache_salt")
        return f"{self.tenant_of(key)}:{salt or ''}" if self.separates_keys else salt or ""

    @property
    def separates_keys(self) -> bool:
        """Whether no key may learn what another one has asked."""
        return len(self._config.api_keys) > 1 and not self._config.shares_cache

    def tenant_of(self, key: str) -> str:
        """Return a name for the owner of a key, which does not reveal the key."""
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() if key else ""
