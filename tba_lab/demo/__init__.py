"""The demonstration: a small Megatron GPT that trains on real text."""
