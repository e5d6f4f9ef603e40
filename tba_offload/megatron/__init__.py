"""The integration with Megatron-LM. No other part of the package depends on Megatron.

megatron-core is optional. This package can be imported without megatron-core.
"""
