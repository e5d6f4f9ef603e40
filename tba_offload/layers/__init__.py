"""The layers of a model: which they are, what they are given, and how they lie in autograd's graph."""
