"""The states that steps save, from their reservation in the pool until they are published."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.cache.lease import Lease, Reservation
from megatron_hybrid.cache.policy.placement import most_wanted
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request, RequestStatus
from megatron_hybrid.inference.scheduling.plan_builder import Chunk
from megatron_hybrid.inference.scheduling.step_plan import StepResult
from megatron_hybrid.utils.out_of_memory import optional_decision


def reserve_states(cache: PrefixCache, chunks: Iterable[Chunk], captures_left: int) -> None:
    """Reserve room for the states that these chunks of a step save. States without room are left
    out. captures_left: states that may be captured inside the forward."""
    later = []
    for chunk in chunks:
        lease = chunk.request.lease
        positions = cache.positions_to_save(lease, chunk.end)
        if positions and chunk.start > lease.done:  # a step that runs saves those before
            positions = [position for position in positions if position > chunk.start]
        if chunk.request.status is RequestStatus.CLOSING:
            positions = [chunk.end]
        if not positions:
            continue
        opportunistic = [p for p in positions if lease.wanted.get(p) is Kind.OPPORTUNISTIC]
        if opportunistic:
            later.append((chunk, opportunistic))
            positions = [p for p in positions if p not in opportunistic]
        captures_left -= _reserve_of(cache, chunk, positions, captures_left)
    for chunk, positions in later:
        captures_left -= _reserve_of(cache, chunk, positions, captures_left)


def _reserve_of(cache: PrefixCache, chunk: Chunk, positions: list[int], most: int) -> int:
    """Reserve room for the states of a chunk at these positions. Return how many of them lie
    inside of it, at most `most`."""
    lease, end = chunk.request.lease, chunk.end
    inside = [position for position in positions if position < end]
    if len(inside) > most:
        declined = set(inside).difference(most_wanted(inside, lease.wanted, most))
        cache.decline(lease, sorted(declined))
        positions = [position for position in positions if position not in declined]
    captures = 0
    for position in positions:
        reservation = reserve_state(cache, lease, position)
        if reservation is not None:
            chunk.reservations.append(reservation)
            captures += position < end
    return captures


def reserve_state(cache: PrefixCache, lease: Lease, position: int) -> Reservation | None:
    """Reserve room for one state, or return None."""
    reservation = None
    with _optional(cache, lease, position):
        reservation = cache.reserve_checkpoint(lease, position)
    return reservation


def _optional(cache: PrefixCache, lease: Lease, position: int) -> AbstractContextManager[None]:
    """Return a context for saving a state, which is declined for lack of memory."""
    return optional_decision(lambda error: cache.decline(lease, [position]))


def publish_states(
    cache: PrefixCache, request: Request, reservations: list[Reservation], result: StepResult
) -> None:
    """Publish saved states, and release the reservations of unsaved ones and of those after a
    rejected draft."""
    for reservation in reservations:
        position = reservation.position
        if position > request.num_computed:
            continue
        if (request.request_id, position) in result.unsaved:
            cache.decline(request.lease, [position])
            continue
        with _optional(cache, request.lease, position):
            cache.publish_checkpoint(reservation)
    for reservation in reservations:
        if reservation in request.lease.reservations:
            cache.abandon(reservation)
