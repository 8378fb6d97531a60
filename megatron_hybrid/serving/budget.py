"""RequestBudget: the most that a body may hold, from what the engine can answer.

A body is measured before anything is made of it. Its texts are measured by the tokenizer, which is
`limited_to` the context: all routes tokenize by that one.
"""

import numpy as np

from megatron_hybrid.serving.errors import ApiError

_OTHERS = 64 << 10
"""Values besides those of prompts: schemas, tools, labels, biases."""
_MEMBERS_OF_TOKEN = 16
"""Objects, lists and members for each token of the context. A message takes at least one token, and
has a role, a content and perhaps calls with ids, names and arguments."""
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[[*b"[{:"]] = True


class RequestBudget:
    """The most that a body of JSON may hold.

    Args:
        context: tokens of a prompt and its answer.
        max_prompts: of one request.
        vocab_size: of the model.
    """

    def __init__(self, context: int, max_prompts: int, vocab_size: int):
        self.max_members = _MEMBERS_OF_TOKEN * context + _OTHERS
        """Objects, lists, and members of objects."""
        self.max_elements = context * max_prompts + vocab_size + _OTHERS
        """Commas: elements of lists, such as token ids, and members."""

    def check(self, body: bytes) -> None:
        """Raise ApiError for a body of more values than any request that can be answered."""
        if (
            sum(map(body.count, (b"[", b"{", b":"))) <= self.max_members
            and body.count(b",") <= self.max_elements
        ):
            return
        members, elements = values_of(body)
        for count, most, what in (
            (members, self.max_members, "objects, lists and members"),
            (elements, self.max_elements, "elements"),
        ):
            if count > most:
                text = f"the body has {count} {what}, and this server's context allows {most}"
                raise ApiError(400, f"{text}: send less")


def values_of(body: bytes) -> tuple[int, int]:
    """Return how many objects, lists and members, and how many commas are in some JSON, outside of
    its strings. JSON is not checked; before a mistake in it the counts are right."""
    data = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    is_outside = ~np.logical_xor.accumulate(data == ord('"'))
    members = np.count_nonzero(_STRUCTURE[data] & is_outside)
    return members, np.count_nonzero((data == ord(",")) & is_outside)
