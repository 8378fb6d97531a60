"""A tokenizer of bytes."""

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from megatron_hybrid.text.tokenizer import Tokenizer

END = "<|endoftext|>"


def byte_tokenizer(vocab_size: int | None = None) -> Tokenizer:
    """Of the 256 bytes alone; with a size, of others up to it, the last one an end token."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size is not None:
        pieces += [f"<extra{i}>" for i in range(vocab_size - 1 - len(pieces))]
    inner = Inner(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if vocab_size is None:
        return Tokenizer(inner)
    inner.add_special_tokens([END])
    return Tokenizer(inner, inner.token_to_id(END))
