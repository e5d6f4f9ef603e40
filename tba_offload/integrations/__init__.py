"""Callbacks that add offloading to the trainers of other packages."""
