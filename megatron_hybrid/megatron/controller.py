"""Megatron's GPTInferenceWrapper and TextGenerationController: carriers of model and tokenizer."""

from typing import Any

from torch import nn

from megatron_hybrid.checkpoints.megatron.built_model import from_megatron
from megatron_hybrid.megatron.context import DynamicInferenceContext
from megatron_hybrid.megatron.errors import require
from megatron_hybrid.models.hybrid_model import HybridModel, unwrap
from megatron_hybrid.utils.validation import takes_argument


class GPTInferenceWrapper:
    """Carries the model and the context to the engine.

    Args:
        model: a HybridModel, or a model that Megatron built; wrapped or bare.
        inference_context: the one of the same script.

    Raises:
        TypeError, ValueError: the model cannot be served; the message says why.
    """

    def __init__(self, model: nn.Module, inference_context: DynamicInferenceContext):
        require(inference_context, DynamicInferenceContext, "inference_context")
        self.model = model
        self.inference_context = inference_context
        inner = unwrap(model)
        self.hybrid_model = inner if isinstance(inner, HybridModel) else from_megatron(inner)


class TextGenerationController:
    """Carries the tokenizer to the engine, and applies it.

    Args:
        inference_wrapped_model: has model and context.
        tokenizer: has Megatron's `tokenize`, `detokenize` and `eod`; None allows only token ids.
    """

    def __init__(self, inference_wrapped_model: GPTInferenceWrapper, tokenizer: Any):
        require(inference_wrapped_model, GPTInferenceWrapper, "inference_wrapped_model")
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return self.inference_wrapped_model.hybrid_model.vocab_size

    @staticmethod
    def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of a text, with one BOS token in front, or none.

        Raises:
            AssertionError: `add_BOS` is set, and the tokenizer has no BOS token.
        """
        bos = getattr(tokenizer, "bos", None)
        if add_BOS and bos is None:
            raise AssertionError("add_BOS is set, but the tokenizer has no bos token: leave it out")
        tokens = list(tokenizer.tokenize(prompt))
        while bos is not None and tokens[:1] == [bos]:
            del tokens[0]
        return [bos, *tokens] if add_BOS else tokens

    @staticmethod
    def detokenize(
        tokenizer: Any,
        tokens: list[int],
        remove_EOD: bool = True,
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the text of token ids. `remove_EOD` drops the tokenizer's `eod` at the end."""
        eod = getattr(tokenizer, "eod", None)
        tokens = list(tokens)
        while remove_EOD and eod is not None and tokens[-1:] == [eod]:
            del tokens[-1]
        if takes_argument(tokenizer.detokenize, "skip_special_tokens"):
            return tokenizer.detokenize(tokens, skip_special_tokens=skip_special_tokens)
        return tokenizer.detokenize(tokens)
