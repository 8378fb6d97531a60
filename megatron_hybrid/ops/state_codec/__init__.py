"""Codes of recurrent states in checkpoints."""

from megatron_hybrid.ops.state_codec.codec import HORIZON_TOKENS, StatesCodec, importance_of

__all__ = ["HORIZON_TOKENS", "StatesCodec", "importance_of"]
