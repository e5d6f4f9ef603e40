"""Integration with Megatron-LM. No other part of tba-offload depends on Megatron.

megatron-core is optional. This package can be imported without megatron-core.
"""
