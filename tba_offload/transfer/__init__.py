"""Bytes in motion: the life of an offloaded storage, and the queues that move it."""
