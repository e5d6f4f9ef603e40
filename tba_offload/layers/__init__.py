"""The layers of a model, their arguments and outputs, and their nodes in autograd's graph."""
