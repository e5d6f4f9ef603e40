"""Tools around tba-offload: the demo, GPT models to try, and Megatron-LM on a CPU.

This package is installed with tba-offload. The library imports it only for commands that need it.
"""
