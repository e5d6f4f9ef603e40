"""Integrates with Megatron-LM. No other part of the package names Megatron.

megatron-core is optional. This package can be imported without it.
"""
