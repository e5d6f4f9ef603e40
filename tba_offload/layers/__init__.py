"""Layers of a model: how they are found, their arguments and outputs, and their nodes in autograd's graph."""
