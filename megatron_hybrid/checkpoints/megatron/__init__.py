"""Models and checkpoints of megatron-core and Megatron-LM, as HybridModels."""
