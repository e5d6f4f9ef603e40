"""What a training step does: which tensors its layers save, in which order backward uses them."""
