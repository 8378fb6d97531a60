"""A package of its own, which adds to megatron_hybrid once it is installed."""
