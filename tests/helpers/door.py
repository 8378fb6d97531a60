"""Engines built through `megatron_hybrid.megatron`, as scripts build them, with sizes for tests."""

import torch
from differential import failing_at_first
from reference import tiny_model

from megatron_hybrid.megatron import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)

MIB = 1 / 1024  # in GB
BLOCK = 16


class LetterTokenizer:
    """A token is a printable character; the last two tokens are `eod` and `bos`."""

    eod, bos = 95, 96
    vocab_size = 97

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(chr(token + 32) for token in tokens if token < self.eod)


def door_config(**fields) -> InferenceConfig:
    """The cache in restore mode, and small sizes, unless `fields` say otherwise."""
    return InferenceConfig(
        **{
            "block_size_tokens": BLOCK,
            "buffer_size_gb": 4 * MIB,
            "max_requests": 8,
            "max_tokens": 512,
            "max_sequence_length": 1024,
            "enable_prefix_caching": True,
            "prefix_caching_mamba_gb": 4 * MIB,
            **fields,
        }
    )


def door_engine(model: torch.nn.Module | None = None, tokenizer=None, **fields):
    """An engine; `fields` are of InferenceConfig."""
    model = model or tiny_model()
    context = DynamicInferenceContext(model.config, door_config(**fields))
    controller = TextGenerationController(
        GPTInferenceWrapper(model, context), tokenizer or LetterTokenizer()
    )
    return DynamicInferenceEngine(controller, context)


def greedy_params(count: int | None, **fields) -> SamplingParams:
    """Greedy, and only the length ends the answer."""
    return SamplingParams(top_k=1, num_tokens_to_generate=count, **{"termination_id": -1, **fields})


def finish(engine) -> dict:
    """Step until all is answered. Returns the merged requests by id."""
    answers = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            answers[record.request_id] = record.merge()
    return answers


def answer(engine, prompt, params: SamplingParams):
    """Answer one prompt."""
    (record,) = engine.generate([prompt], params)
    return record.merge()


def fail_forwards(monkeypatch, engine, times: int) -> None:
    """Let the next forwards of an engine raise."""
    runner, error = engine.engine.runner, ArithmeticError("the device is broken")
    monkeypatch.setattr(runner, "forward", failing_at_first(runner.forward, error, times))
