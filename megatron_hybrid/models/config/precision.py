"""dtypes of parameters, activations and states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_hybrid.models.config.field_group import ModelFields

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Name in config.json -> dtype."""


@dataclass
class PrecisionFields(ModelFields):
    """The dtypes of parameters and states."""

    if TYPE_CHECKING:
        bf16: bool = False
        fp16: bool = False
        pipeline_dtype: torch.dtype | None = None

    params_dtype: torch.dtype = torch.float32
    """dtype of parameters and activations; `bf16` and `fp16` follow from it, or it from them."""

    fp32_residual_connection: bool = False
    """Keep the residual stream, and the tensors between pipeline stages, in fp32; norms and mixers
    take them rounded to params_dtype."""

    recurrent_state_dtype: torch.dtype = torch.float32
    """dtype of stored recurrent states; their arithmetic is always fp32. With bfloat16 a state is
    rounded at the end of each forward pass, so outputs depend on where these end."""

    def check(self) -> None:
        """See `FieldGroup.check`. `bf16`, `fp16` and `params_dtype` agree afterwards, whichever of
        them the caller set."""
        if self.bf16 or self.fp16:
            named = torch.bfloat16 if self.bf16 else torch.float16
            if self.params_dtype not in (torch.float32, named):
                raise ValueError(
                    f"bf16={self.bf16} and fp16={self.fp16} contradict params_dtype="
                    f"{self.params_dtype}. Set params_dtype alone."
                )
            self.params_dtype = named
        if self.params_dtype not in DTYPES.values():
            raise ValueError(f"params_dtype is {self.params_dtype}; use one of {list(DTYPES)}.")
        self.bf16 = self.params_dtype == torch.bfloat16
        self.fp16 = self.params_dtype == torch.float16
        # Of the hidden states between stages.
        self.pipeline_dtype = torch.float32 if self.fp32_residual_connection else self.params_dtype
        if self.recurrent_state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"recurrent_state_dtype is {self.recurrent_state_dtype}; use torch.float32, or "
                "torch.bfloat16 for half the memory. In torch.float16, whose range ends at 65504, "
                "a state that adds up over a long sequence overflows or underflows in silence."
            )
