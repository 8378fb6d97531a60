"""The layer pattern language: one symbol per layer, `|` between pipeline stages.

`M` Mamba-2, `G` Gated DeltaNet, `*` full attention, `W` sliding-window attention, `-` MLP.
The symbols are megatron-core's where it has one; `W` is ours.
"""

from __future__ import annotations

STAGE_BOUNDARY = "|"

SYMBOLS: dict[str, str] = {
    "M": "Mamba-2",
    "G": "Gated DeltaNet",
    "*": "full attention",
    "W": "sliding-window attention",
    "-": "MLP",
}
"""Every layer symbol, and what it stands for."""


def parse(pattern: str) -> list[str]:
    """The symbols of a pattern in order, stage boundaries included.

    Raises:
        ValueError: the pattern is empty, has an unknown symbol, or has a stage without a layer.
    """
    known = ", ".join(f"'{symbol}' {meaning}" for symbol, meaning in SYMBOLS.items())
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"layer_pattern is {pattern!r}, but a model needs one layer or more. "
            f"Write one symbol per layer: {known}."
        )
    for place, symbol in enumerate(pattern):
        if symbol not in SYMBOLS and symbol != STAGE_BOUNDARY:
            raise ValueError(
                f"layer_pattern {pattern!r} has the unknown symbol {symbol!r} at place "
                f"{place + 1} of {len(pattern)}. "
                f"Known: {known}, '{STAGE_BOUNDARY}' pipeline stage boundary."
            )
    if any(not stage for stage in pattern.split(STAGE_BOUNDARY)):
        raise ValueError(
            f"layer_pattern {pattern!r} has a pipeline stage without a layer. Put at least one "
            f"symbol on each side of every '{STAGE_BOUNDARY}'."
        )
    return list(pattern)


def layer_symbols(pattern: str) -> list[str]:
    """The layers of the whole model, without stage boundaries."""
    return [symbol for symbol in parse(pattern) if symbol != STAGE_BOUNDARY]


def split_stages(pattern: str, num_stages: int) -> list[list[str]]:
    """The layers of each pipeline stage.

    A pattern with boundaries says where the stages lie; one without is cut into equal parts.

    Raises:
        ValueError: the pattern does not give `num_stages` stages.
    """
    symbols = parse(pattern)
    stages = [list(stage) for stage in "".join(symbols).split(STAGE_BOUNDARY)]
    if len(stages) == num_stages:
        return stages
    if num_stages == 1:
        # A model for several stages also runs on one: the boundaries then mean nothing.
        return [[symbol for stage in stages for symbol in stage]]
    if len(stages) > 1:
        raise ValueError(
            f"layer_pattern {pattern!r} has {len(stages)} pipeline stages, but "
            f"pipeline_model_parallel_size is {num_stages}. Use {num_stages - 1} '|' or none."
        )
    if len(symbols) % num_stages:
        raise ValueError(
            f"layer_pattern {pattern!r} has {len(symbols)} layers, which do not divide evenly over "
            f"{num_stages} pipeline stages. Mark the stages with '{STAGE_BOUNDARY}'."
        )
    size = len(symbols) // num_stages
    return [symbols[i * size : (i + 1) * size] for i in range(num_stages)]
