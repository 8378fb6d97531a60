"""Replays of request traces through prefix caches, without a model: ours, and models of others."""
