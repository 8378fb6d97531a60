"""Inference for hybrid language models on megatron-core, with prefix sharing at any token."""
