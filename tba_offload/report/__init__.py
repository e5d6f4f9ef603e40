"""Run logs, and the pictures and tables that are made from run logs.

This package does not import torch, so run logs can be read on a machine without torch.
"""
