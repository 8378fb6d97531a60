"""Model geometries: what a token and a state cost, and the work that they spare."""

from dataclasses import dataclass
from math import inf, prod

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup

BYTES_PER_ELEMENT = {"exact": 4, "bf16": 2, "int8": 1}
"""Of a recurrent state in a checkpoint, by encoding, scales included. Convolution tails stay as
they are (bf16)."""
BYTES_PER_VALUE = 2
"""Weights, KV, convolution tails and hidden states are bf16."""


@dataclass(frozen=True)
class Geometry:
    """A model as far as a cache sees it."""

    name: str
    hidden_size: int
    attention_layers: int
    """Layers that attend to everything."""
    kv_heads: int
    head_dim: int
    mlp_layers: int
    state_layers: int = 0
    conv_shape: tuple[int, ...] = ()
    """Convolution tail of one layer."""
    ssm_shape: tuple[int, ...] = ()
    """Recurrent state of one layer."""
    window_layers: int = 0
    window: int = 0
    """Tokens that the window layers see."""
    state_kind: str | None = None
    """What the state layers are: "mamba-1", "mamba-2" or "gdn"."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of all layers that attend to everything."""
        return self.attention_layers * self.kv_bytes_per_layer

    @property
    def kv_bytes_per_layer(self) -> int:
        """KV of one token in one layer that attends."""
        return 2 * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    def recurrent_bytes(self, encoding: str = "exact") -> int:
        """Recurrent states and convolution tails of all layers after one position."""
        if not self.state_layers:
            return 0
        conv = prod(self.conv_shape) * BYTES_PER_VALUE
        return self.state_layers * (conv + prod(self.ssm_shape) * BYTES_PER_ELEMENT[encoding])

    def state_bytes(self, encoding: str = "exact") -> int:
        """All that resuming needs in addition to the KV at a position: recurrent states and
        the KV of a whole window. 0: the KV of full attention is enough."""
        return self.recurrent_bytes(encoding) + self.window * self.window_bytes_per_token

    @property
    def window_bytes_per_token(self) -> int:
        """KV of all layers with a window."""
        return self.window_layers * self.kv_bytes_per_layer

    def spec(self, encoding: str = "exact") -> CacheSpec:
        """Return the same as `PrefixCache` takes it. What need not be computed again is weighed by
        its tokens, where the engine weighs its FLOPs."""
        groups = [KVGroup(self.attention_layers, self.kv_bytes_per_layer)]
        if self.window_layers:
            groups.append(KVGroup(self.window_layers, self.kv_bytes_per_layer, self.window))
        return CacheSpec(
            16,
            tuple(groups),
            state_bytes=self.recurrent_bytes(),
            encoded_state_bytes=self.recurrent_bytes(encoding),
            hidden_bytes=self.hidden_size * BYTES_PER_VALUE,
            attention_parity=inf,
        )

    def prefill_flops(self, n: int) -> float:
        """Count those of a prompt of n tokens, by layer kind as in Marconi (Pan et al., MLSys 2025,
        table 1): 8 n D^2 + 4 n^2 D for attention, 16 n D^2 for an MLP, 12 n D^2 + 16 n D N + 10 n
        for a state space layer; a window bounds the quadratic part."""
        d, state = self.hidden_size, self.ssm_shape[-1] if self.ssm_shape else 0
        seen = min(n, self.window or n)
        return (
            self.attention_layers * (8 * n * d * d + 4 * n * n * d)
            + self.window_layers * (8 * n * d * d + 4 * n * seen * d)
            + self.mlp_layers * 16 * n * d * d
            + self.state_layers * (12 * n * d * d + 16 * n * d * state + 10 * n)
        )


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry(
            "nemotron-h-8b",
            hidden_size=4096,
            attention_layers=4,
            kv_heads=8,
            head_dim=128,
            mlp_layers=24,
            state_layers=24,
            conv_shape=(3, 10240),
            ssm_shape=(128, 64, 128),
            state_kind="mamba-2",
        ),
        Geometry(
            "qwen3.5-4b",
            hidden_size=2560,
            attention_layers=8,
            kv_heads=4,
            head_dim=256,
            mlp_layers=32,
            state_layers=24,
            conv_shape=(3, 8192),
            ssm_shape=(32, 128, 128),
            state_kind="gdn",
        ),
        Geometry(
            "jamba-1.5-mini",
            hidden_size=4096,
            attention_layers=4,
            kv_heads=8,
            head_dim=128,
            mlp_layers=32,
            state_layers=28,
            conv_shape=(3, 8192),
            ssm_shape=(8192, 16),
            state_kind="mamba-1",
        ),
        Geometry(
            "gemma-3-27b",
            hidden_size=5376,
            attention_layers=10,
            kv_heads=16,
            head_dim=128,
            mlp_layers=62,
            window_layers=52,
            window=1024,
        ),
        Geometry(
            "llama-3-8b",
            hidden_size=4096,
            attention_layers=32,
            kv_heads=8,
            head_dim=128,
            mlp_layers=32,
        ),
    )
}
