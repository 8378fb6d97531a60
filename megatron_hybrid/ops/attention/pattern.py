"""AttentionPattern: the positions that a token sees."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionPattern:
    """The positions that a token sees, and the score as a function of q . k. The fields of a
    config, from which it is made, have been checked."""

    scale: float
    """Factor of q . k."""
    window: int | None = None
    """The token at position t sees the positions (t - window, t]; None means all up to t."""
    chunk: int | None = None
    """The token at position t sees [t // chunk * chunk, t] (chunked attention of Llama 4);
    None means no chunks. At most one of window and chunk is given."""
    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap) (Gemma 2); None means no cap."""
    skips_first: bool = False
    """Whether only the first token sees its position: the layers of multi-token prediction begin
    with the second one, and their rows lie in the places of all tokens."""
    dropout: float = 0.0
    """Probability with which each weight of the softmax becomes 0; the others grow by
    1 / (1 - dropout). In training alone."""

    @property
    def is_local(self) -> bool:
        """Whether a token sees a bounded number of tokens before it."""
        return self.window is not None or self.chunk is not None

    def first_visible(self, position: int | torch.Tensor) -> int | torch.Tensor:
        """Return the first position that the token at `position` sees; negative where a window
        reaches before the start of the sequence."""
        if self.window is not None:
            first = position - self.window + 1
        else:
            first = 0 if self.chunk is None else position // self.chunk * self.chunk
        if not self.skips_first:
            return first
        least = (position > 0) * 1
        return first + (first < least) * (least - first)
