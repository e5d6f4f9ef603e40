"""The activations of a training step: the tensors that layers save, and when backward uses these tensors."""
