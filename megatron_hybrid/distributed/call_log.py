"""CallLog: the calls that a rank has made since all ranks were last known to agree, and a digest of
all of them, by which ranks see whether they still agree."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest

import numpy as np

from megatron_hybrid.distributed.rendezvous import Member

DIGEST_BYTES = 8
Call = tuple[str, Mapping[str, object]]
"""A name, and the values that must be equal, by name: numpy arrays, or objects with a `repr`."""
_NONE: Call = ("nothing", {})


class CallLog:
    """Calls of one rank, in order."""

    def __init__(self) -> None:
        self.digest = bytes(DIGEST_BYTES)
        """Digest of all calls ever noted."""
        self.recent: list[Call] = []
        """Calls that other ranks may have made otherwise."""

    def note(self, name: str, values: Mapping[str, object]) -> None:
        digest = blake2b(self.digest, digest_size=DIGEST_BYTES)
        digest.update(name.encode())
        for key, value in values.items():
            is_array = isinstance(value, np.ndarray)
            data = value.tobytes() if is_array else repr(value).encode(errors="surrogatepass")
            digest.update(f"{key} {len(data)} ".encode() + data)
        self.digest = digest.digest()
        self.recent.append((name, values))

    def agreed(self) -> None:
        """Forget the recent calls, as all ranks have the same digest."""
        self.recent.clear()


def describe_difference(calls: Sequence[tuple[Member, Sequence[Call]]]) -> str:
    """Describe the first call in which a rank differs from the first one, with both values. calls:
    of all ranks, not all equal."""
    (first, own), *others = calls
    for other, theirs in others:
        for a, b in zip_longest(own, theirs, fillvalue=_NONE):
            if (what := _difference(a, b)) is not None:
                return (
                    f"the ranks have made different calls: {first} {what[0]}, {other} {what[1]}. "
                    "All ranks must make the same calls in the same order, or one of them leads"
                )
    return "the ranks have made different calls"


def _difference(own: Call, their: Call) -> tuple[str, str] | None:
    if own[0] != their[0]:
        return f"has called {_summary(own)}", f"has called {_summary(their)}"
    for key, value in own[1].items():
        other = their[1].get(key)
        if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
            if not np.array_equal(value, other):
                name = f"has called {own[0]} with"
                return tuple(f"{name} {text}" for text in _array_difference(key, value, other))
        elif repr(value) != repr(other):
            name = f"has called {own[0]} with {key}"
            return f"{name} {value!r}", f"{name} {other!r}"
    return None


def _array_difference(key: str, own: np.ndarray, their: np.ndarray) -> tuple[str, str]:
    if len(own) != len(their):
        return f"{len(own)} {key}", f"{len(their)} {key}"
    at = int(np.flatnonzero(own != their)[0])
    return f"{own[at]} at position {at} of {key}", f"{their[at]} at position {at} of {key}"


def _summary(call: Call) -> str:
    name, values = call
    arrays = [f"{len(v)} {key}" for key, v in values.items() if isinstance(v, np.ndarray)]
    return f"{name} of {', '.join(arrays)}" if arrays else name
