"""What is kept of past requests: see README.md. Numpy and the standard library only."""
