"""A checksum that is computed mostly on the device of the bytes, so that few bytes are copied to the host."""

from __future__ import annotations

import ctypes

import torch

_WORD, _ROW = 8, 4096
"""Sizes in bytes of a word and of a row in the table of :func:`sums`. One byte in 512 is copied to the
host."""


def sums(data: torch.Tensor) -> bytes:
    """Return the sums of the rows and columns of a table that holds the data as 64-bit words.

    Bytes that do not fill a row are returned unchanged, after the sums. If one word changes, two sums change.
    If two words are exchanged, at least two sums change too.

    Args:
        data: 1-D uint8 tensor on any device.

    Returns:
        Bytes for a checksum. The bytes do not depend on the address of ``data``.
    """
    rows = data.numel() // _ROW
    body, rest = data[: rows * _ROW], data[rows * _ROW :]
    if body.storage_offset() % _WORD or body.data_ptr() % _WORD:
        body = body.clone()
    table = body.view(torch.int64).view(rows, _ROW // _WORD)
    parts = (part.cpu() for part in (table.sum(0), table.sum(1), rest))
    # PyTorch's own function for the bytes of a tensor needs NumPy.
    return b"".join(ctypes.string_at(part.data_ptr(), part.nbytes) if part.nbytes else b"" for part in parts)
