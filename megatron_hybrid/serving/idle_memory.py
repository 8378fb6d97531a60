"""Memory that requests have freed goes back to the system while none runs."""

import asyncio
import ctypes
from functools import partial

from megatron_hybrid.serving.admission import Admission
from megatron_hybrid.serving.json_response import to_cpu_thread

_REST_SECONDS = 2.0
"""Seconds without a request before freed memory goes back to the system."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc has it


async def trim_when_idle(admission: Admission) -> None:
    """Whenever no request runs any more, give the memory that those have freed back to the system,
    until cancelled: the allocator would keep what large ones took."""
    num_done = 0
    while True:
        await asyncio.sleep(_REST_SECONDS)
        if not admission.load and admission.num_admitted > num_done:
            num_done = admission.num_admitted
            await to_cpu_thread(partial(_trim, 0))
