"""train_tokenizer: a tokenizer from text."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_hybrid.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text has tokens, and `END_OF_TEXT` is token 0, which ends a document.

    Args:
        vocab_size: most tokens, the 256 bytes and `END_OF_TEXT` among them; of little text fewer
            are made.

    Raises:
        ValueError: vocab_size is less than 257.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be 257 or more: the bytes, and {END_OF_TEXT}."
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer, eod=tokenizer.token_to_id(END_OF_TEXT))
