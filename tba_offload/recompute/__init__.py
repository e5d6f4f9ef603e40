"""Recomputation of layers: a second run in backward, with the state of the first run and compared with it."""
