"""Recomputation of layers in backward, and comparison of each recomputation with the first run."""
