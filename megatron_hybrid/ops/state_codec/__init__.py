"""Codes of recurrent states in checkpoints."""
