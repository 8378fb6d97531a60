"""Programs over the ranks of a model: their options, and how ranks are started."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from megatron_hybrid.commands.arguments import whole_number
from megatron_hybrid.utils.child_lifetime import EndSignal

LAYOUT = (
    ("tp", "tensor_model_parallel_size", "Split every layer over this many ranks, one GPU each"),
    (
        "pp",
        "pipeline_model_parallel_size",
        "Split the layers into this many stages, each of which has the ranks of --tp",
    ),
    ("ep", "expert_model_parallel_size", "Split the experts of each layer over this many ranks"),
)
"""Options of the layout over ranks, their fields of HybridConfig, and what they do."""


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the layout."""
    for name, field, what in LAYOUT:
        parser.add_argument(
            f"--{name}", type=whole_number, default=1, metavar="N", help=f"{what} ({field})."
        )


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """Return fields of HybridConfig, from the options of `add_layout`."""
    return {field: getattr(options, name) for name, field, _ in LAYOUT}


def run_on_ranks(
    options: argparse.Namespace,
    program: Sequence[str],
    first: Callable[[], AbstractContextManager[Callable[[], None]]],
    follow: Callable[[], None],
    end: EndSignal,
) -> int:
    """Start the ranks of a layout, or run as one of them. Return the exit status: 0 after a
    SIGTERM, even if another rank got it first.

    Args:
        options: those of `add_engine` and `add_layout`.
        program: words after `python`, without the `options.arguments` that follow them.
        first: makes the context of the first rank, with the addresses that it needs, which yields
            what runs there. It is tried before ranks are started.
        follow: runs on the other ranks.
        end: takes SIGTERM since the command began.

    Raises:
        ValueError: there is no such layout of this model on these ranks.
    """
    sizes, rank = sizes_of(options), None
    if "WORLD_SIZE" in os.environ or max(sizes.values()) > 1:
        from megatron_hybrid.serving.launch import check_layout, job_size, launch, take_rank

        num_ranks = check_layout(options.model, sizes, options.device)
        if job_size() is None and num_ranks > 1:
            with first():
                pass
            end.hold()  # it is passed on to the ranks
            return launch([*program, *options.arguments], num_ranks)
        rank = take_rank(num_ranks, options.device)
    from megatron_hybrid.distributed.ranks import RankError
    from megatron_hybrid.distributed.watchdog import RankFailedError
    from megatron_hybrid.serving.run import log_lines
    from megatron_hybrid.utils.child_lifetime import ends_with_launcher

    try:
        with ends_with_launcher():
            log_lines(rank)
            if rank:
                follow()
            else:
                with first() as serve:
                    serve()
    except (RankError, RankFailedError) as error:
        if end.was_sent and not end.serves:
            return 0
        print(f"megatron-hybrid: {error}", file=sys.stderr)
        return 1
    return 0
