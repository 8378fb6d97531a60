"""Training data: datasets of token rows, and batches of packed sequences."""
