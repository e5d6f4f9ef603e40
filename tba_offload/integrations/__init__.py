"""Callbacks that add offloading to the trainers of transformers and Lightning."""
