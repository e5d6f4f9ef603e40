"""A checksum that is mostly computed where the bytes lie, so that few of them have to come to the host."""

from __future__ import annotations

import ctypes

import torch

_WORD, _ROW = 8, 4096
"""Bytes of a word, and of a row of the table: one byte in 512 comes to the host."""


def sums(data: torch.Tensor) -> bytes:
    """Sum of rows and of columns of the data, taken as a table of 64-bit words, and what is left at its end.

    Any change of one word changes two of the sums, and words that change places change two as well unless
    they are of one row and one column.

    Args:
        data: 1-D uint8 tensor on any device.

    Returns:
        Bytes for a checksum; they depend on the values of ``data`` only, not on its address.
    """
    rows = data.numel() // _ROW
    body, rest = data[: rows * _ROW], data[rows * _ROW :]
    if body.storage_offset() % _WORD or body.data_ptr() % _WORD:
        body = body.clone()
    table = body.view(torch.int64).view(rows, _ROW // _WORD)
    parts = (table.sum(0), table.sum(1), rest)
    return b"".join(_bytes_of(part.cpu()) for part in parts)


def _bytes_of(part: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor in host memory; PyTorch's own way to them would need NumPy."""
    return ctypes.string_at(part.data_ptr(), part.nbytes) if part.nbytes else b""
