"""Agreement between the ranks of a tensor-, pipeline- or expert-parallel job.

Every rank runs the same scheduler over the same requests, so they decide alike without messages.
Inputs that could differ (number of pages, sizes of layers) are made equal once, at the start.
"""

import torch
import torch.distributed as dist

from megatron_hybrid.compat import parallel_state


def _model_parallel_group():
    """The ranks that hold parts of one model; None: there is one part."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if not parallel_state.model_parallel_is_initialized():
        return None
    group = parallel_state.get_model_parallel_group()
    return group if group.size() > 1 else None


def _device_of(group) -> torch.device:
    is_nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def agree_on_minimum(value: int) -> int:
    """Return the smallest `value` of all ranks that hold parts of this model."""
    group = _model_parallel_group()
    if group is None:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=_device_of(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return int(tensor)


def agree_on_all(answer: bool) -> bool:
    """Whether `answer` is True on all ranks."""
    return bool(agree_on_minimum(int(answer)))


def agree_on_one(value: int) -> bool:
    """Whether `value` is the same on all ranks."""
    return agree_on_minimum(value) == -agree_on_minimum(-value)


def gather(value: object) -> list:
    """Return the picklable `value` of every rank that holds a part of this model, in rank order."""
    group = _model_parallel_group()
    if group is None:
        return [value]
    gathered = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def rank_name() -> str:
    """This rank's number among the model's, for names of files: "rank-0-of-1"."""
    group = _model_parallel_group()
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    return f"rank-{rank}-of-{size}"


def check_equal_on_ranks(digest: int, when: str) -> None:
    """Raise RuntimeError if the digests of the ranks differ (debug mode)."""
    group = _model_parallel_group()
    if group is None:
        return
    # Signed: torch has no full set of operations on uint64.
    signed = (digest & ((1 << 64) - 1)) - (1 << 63)
    tensor = torch.tensor([signed], dtype=torch.int64, device=_device_of(group))
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    digests = [int(value) for value in gathered]
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"{when}: the ranks decided differently or compute different tokens (digests "
            f"{digests}). They must be given the same requests in the same order."
        )
