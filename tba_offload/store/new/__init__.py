"""Where the bytes of offloaded activations go: files, host memory, several drives at once."""
