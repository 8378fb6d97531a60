"""InferenceClient: megatron-core's own client of its coordinator."""

from __future__ import annotations

from typing import Any

from megatron_hybrid.compat import coordinator_parts
from megatron_hybrid.megatron.engine import coordinator_needed


class InferenceClient:
    """Makes core's InferenceClient, with the same arguments.

    Raises:
        CoordinatorError: this megatron-core has no such coordinator.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        with coordinator_needed("InferenceClient"):
            core = coordinator_parts()
        return core.InferenceClient(*arguments, **named)
