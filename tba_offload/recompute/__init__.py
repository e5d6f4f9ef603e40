"""Recomputation of layers: a second run in backward, and its comparison with the first run."""
