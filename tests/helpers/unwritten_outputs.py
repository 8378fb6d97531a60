"""Answers of kernels that are not run: what they should have written is whatever was in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_hybrid.inference.worker.model_runner import ModelRunner


@contextmanager
def any_token() -> Iterator[None]:
    """Context in which requests go on by the token 0 where their logits are no numbers."""
    drawn_of = ModelRunner._sampled

    def sampled(runner, drawn, values):
        return [own._replace(token=max(own.token, 0)) for own in drawn_of(runner, drawn, values)]

    ModelRunner._sampled = sampled
    try:
        yield
    finally:
        ModelRunner._sampled = drawn_of
