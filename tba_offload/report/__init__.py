"""Run logs, and the pictures and tables made from them.

This package does not import torch, so run logs can be read on a machine without it.
"""
