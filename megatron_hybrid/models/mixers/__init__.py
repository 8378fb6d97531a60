"""Mixers: one file per layer kind, each maps (hidden, context) -> output."""
