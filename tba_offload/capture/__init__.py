"""Capture of the tensors that layers save, and of the times at which backward uses the tensors."""
