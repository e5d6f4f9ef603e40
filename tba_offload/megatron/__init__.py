"""Everything that knows Megatron; no other part of the package names it.

megatron-core is optional: this package imports without it.
"""
