"""Recomputation of layers: backward runs a layer again, and compares this second run with the first run."""
