"""What shows tba-offload and is none of it: the demo, GPT models to try, Megatron-LM on a CPU.

It is installed with tba-offload, which imports it only where a command asks for it.
"""
