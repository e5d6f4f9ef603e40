"""The benchmark of compression: what it measures, with a codec of Python's own."""

from __future__ import annotations

import sys
import zlib

import pytest
import torch
from places import BENCHMARKS

sys.path.append(str(BENCHMARKS))  # after all others: it has an io.py

import compression
from compression import Codec, Row, chunks, measure, saved_by, table_of, trained

ZLIB = Codec(lambda data: zlib.compress(data, 1), zlib.decompress)


def test_planes_have_all_bytes_of_one_place_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "CHUNK", 8)
    numbers = torch.tensor([0x0102, 0x0304, 0x0506, 0x0708, 0x090A], dtype=torch.int16)
    assert list(chunks([numbers], planes=False)) == [b"\x02\x01\x04\x03\x06\x05\x08\x07", b"\x0a\x09"]
    assert list(chunks([numbers], planes=True)) == [b"\x02\x04\x06\x08\x01\x03\x05\x07", b"\x0a\x09"]


def test_activations_of_a_model_are_compressed_and_come_back() -> None:
    tensors = saved_by(trained(64, 2, 1), torch.bfloat16)
    assert tensors
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    rows = [measure("zlib", ZLIB, tensors, planes=planes, rounds=1) for planes in (False, True)]
    assert 0.3 < rows[1].remains < rows[0].remains < 1  # exponents are alike
    assert all(row.seconds > 0 for row in rows)
    assert table_of(rows, "bf16").row_count == 2


def test_a_codec_that_loses_bytes_is_found() -> None:
    tensors = [torch.arange(1 << 16, dtype=torch.int32)]
    with pytest.raises(AssertionError, match="gave other bytes back"):
        measure("bad", Codec(lambda data: data[:-1], bytes), tensors, planes=False, rounds=1)


def test_what_a_row_says() -> None:
    row = Row("lz4", planes=True, remains=0.5, seconds=4.0)
    assert row.at_most == 2.0
    assert row.gains_below == 2**30 / 2
