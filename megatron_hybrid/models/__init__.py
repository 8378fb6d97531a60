"""What is computed: hybrid models on megatron-core."""
