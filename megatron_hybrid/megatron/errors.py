"""Megatron's errors of requests that do not fit."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from megatron_hybrid.utils.validation import check_field


def require(value: object, kind: type, name: str, *fields: str) -> None:
    """Raise TypeError unless an argument is of this package's class, or has these fields, as one of
    megatron-core's own has."""
    if not (isinstance(value, kind) or (fields and all(hasattr(value, each) for each in fields))):
        raise TypeError(
            f"{name} must be a {kind.__name__} of megatron_hybrid.megatron"
            f"{' or of megatron-core' if fields else ''}, got one of "
            f"{type(value).__module__}.{type(value).__name__}"
        )


def reads_data(deserialize: Callable) -> Callable:
    """Make a method that reads plain data raise a ValueError that says what is wrong with it."""

    @wraps(deserialize)
    def read(*arguments: Any) -> Any:
        check_field(f"the data of {deserialize.__qualname__}()", arguments[-1], Mapping[str, Any])
        try:
            return deserialize(*arguments)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{deserialize.__qualname__} got data with the fields {sorted(arguments[-1])}, "
                f"which serialize() does not write ({type(error).__name__}: {error})"
            ) from error

    return read


class ContextOverflowError(Exception):
    """A request does not fit.

    Args:
        request_id: the caller's; None if the error is of no request.
        message: the reason and the remedy.
        is_transient: whether the request may fit later.
    """

    def __init__(
        self, request_id: int | None, message: str | None = None, *, is_transient: bool = True
    ):
        name = "--" if request_id is None else request_id
        super().__init__(f"request {name}" + ("" if message is None else f" | {message}"))
        self.request_id = request_id
        self.message = message
        self.is_transient = is_transient


class RequestOverflowError(ContextOverflowError):
    """There are too many requests. Here they wait, so it is never raised."""


class TokenOverflowError(ContextOverflowError):
    """A forward pass would have too many tokens. Here prefills are chunked, so it is never
    raised."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """Prompt and answer are longer than `max_sequence_length`."""

    def __init__(self, request_id: int | None, message: str | None = None):
        super().__init__(request_id, message, is_transient=False)


class BlockOverflowError(ContextOverflowError):
    """Prompt and answer need more memory than there is."""


class ActiveRequestCountOverflowError(ContextOverflowError):
    """More requests than `max_requests` are active. Here the others wait, so it is never raised."""

    def __init__(self, max_request_count: int, active_request_count: int):
        super().__init__(
            None,
            f"active_request_count ({active_request_count}) > max_request_count "
            f"({max_request_count}).",
        )


class TensorStateDeallocatedError(ContextOverflowError):
    """The engine is suspended. Here requests are queued meanwhile, so it is never raised."""


_KINDS = {
    kind.__name__: kind for kind in (ContextOverflowError, *ContextOverflowError.__subclasses__())
}


class ContextErrorFactory:
    """Converts these errors to plain data and back."""

    @staticmethod
    def serialize(error: ContextOverflowError) -> dict[str, Any]:
        """Return an error as plain data."""
        return {
            "type": type(error).__name__,
            "request_id": error.request_id,
            "message": error.message,
            "is_transient": error.is_transient,
        }

    @staticmethod
    @reads_data
    def deserialize(data: dict[str, Any]) -> ContextOverflowError:
        """Make an error from the data of `serialize`.

        Raises:
            ValueError: the data is of another error.
        """
        kind = _KINDS.get(data["type"])
        if kind is None:
            raise ValueError(
                f"{data['type']!r} is none of the errors of a context: {', '.join(_KINDS)}"
            )
        error = kind.__new__(kind)
        ContextOverflowError.__init__(
            error, data["request_id"], data["message"], is_transient=data["is_transient"]
        )
        return error
