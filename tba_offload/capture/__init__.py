"""The activations of a training step: tensors that layers save, and the order in which backward uses them."""
