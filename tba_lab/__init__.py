"""Tools around tba-offload: the demo, GPT models, and Megatron-LM on a CPU.

The package ``tba_lab`` is installed with tba-offload. Only a few commands import this package.
"""
