"""Ranges of bytes: they share the memory of tensors, keep it alive, and lie where they are asked to lie."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from harness import CPU
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.device.ranges import CACHE_LINE, ByteRange, aligned_range

ALIGNMENTS = [1, 8, CACHE_LINE, 128, 512, 4096, 2 << 20]
SIZES = [0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 100_000]


def pattern(nbytes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


# Ranges of tensors


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_the_range_of_a_tensor_is_its_bytes(dtype: torch.dtype) -> None:
    tensor = pattern(64 * 16).to(dtype).reshape(-1, 8)
    found = ByteRange.of(tensor)
    assert found.storage is tensor.untyped_storage()
    assert (found.start, found.nbytes, found.address) == (0, tensor.nbytes, tensor.data_ptr())
    assert torch.equal(found.tensor(), bytes_of(tensor))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
def test_the_range_of_a_view_starts_where_the_view_starts(dtype: torch.dtype) -> None:
    whole = pattern(1000).to(dtype)
    view = whole[37:101]
    found = ByteRange.of(view)
    assert (found.start, found.nbytes) == (37 * dtype.itemsize, 64 * dtype.itemsize)
    assert found.address == view.data_ptr()
    assert torch.equal(found.tensor(), bytes_of(view))


def test_tensors_of_a_range_share_its_bytes_in_both_directions() -> None:
    values = torch.zeros(8, dtype=torch.int32)
    shared = ByteRange.of(values[2:6]).tensor()
    assert (shared.dtype, shared.shape) == (torch.uint8, (16,))
    assert shared.data_ptr() == values.data_ptr() + 8
    shared.fill_(1)
    assert values.tolist() == [0, 0, *[0x01010101] * 4, 0, 0]
    values.fill_(-1)
    assert shared.tolist() == [255] * 16
    assert ByteRange.of(values).tensor().untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.zeros(4, 6).t(), r"\(1, 6\)"),
        (torch.zeros(8)[::2], r"\(2,\)"),
        (torch.zeros(4, 6)[:, :3], r"\(6, 1\)"),
        (torch.zeros(1).expand(5), r"\(0,\)"),
    ],
    ids=["transposed", "every second", "columns", "expanded"],
)
def test_a_tensor_that_is_not_contiguous_is_no_range(tensor: torch.Tensor, strides: str) -> None:
    with pytest.raises(ValueError, match=f"strides {strides} is not one range of bytes"):
        ByteRange.of(tensor)


# Life


def test_a_range_keeps_its_storage_alive() -> None:
    tensor = pattern(10_000)
    expected = tensor.clone()
    memory = weakref.ref(tensor.untyped_storage())
    found = ByteRange.of(tensor)
    del tensor
    gc.collect()
    assert memory() is found.storage
    assert torch.equal(found.tensor(), expected)
    del found
    assert memory() is None


# Aligned memory


def assert_lies_like(nbytes: int, address: int, alignment: int) -> None:
    """The same lead as ``address``, room up to the boundaries on both sides, and nothing wasted beyond."""
    found = aligned_range(nbytes, address, alignment, CPU)
    effective = max(alignment, CACHE_LINE)
    lead = address % effective
    begin, end = found.storage.data_ptr(), found.storage.data_ptr() + found.storage.nbytes()
    assert found.nbytes == nbytes
    assert found.address == begin + found.start
    assert found.address % effective == lead
    assert begin <= found.address - lead
    boundary = -(-(found.address + nbytes) // effective) * effective
    assert boundary <= end
    assert boundary - (found.address - lead) == -(-(lead + nbytes) // effective) * effective
    assert found.storage.nbytes() < lead + nbytes + 2 * effective


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_aligned_memory_has_the_lead_of_the_original(nbytes: int, alignment: int) -> None:
    for address in {0, 1, 63, 64, 65, alignment - 1, alignment, alignment + 1, 3 * alignment + 192}:
        assert_lies_like(nbytes, address, alignment)


@given(
    nbytes=st.integers(0, 50_000),
    address=st.integers(0, 2**47),
    alignment=st.sampled_from(ALIGNMENTS[:-1]),
)
def test_aligned_memory_for_any_size_and_address(nbytes: int, address: int, alignment: int) -> None:
    assert_lies_like(nbytes, address, alignment)


def test_the_padding_can_be_filled_without_touching_the_payload() -> None:
    found = aligned_range(1000, 4096 + 200, 512, CPU)
    found.tensor().copy_(pattern(1000))
    ByteRange(found.storage, found.start - 200, 200).tensor().fill_(7)
    ByteRange(found.storage, found.start + 1000, 1536 - 1200).tensor().fill_(7)
    assert torch.equal(found.tensor(), pattern(1000))


def test_a_restored_view_lies_as_the_saved_one_did() -> None:
    saved = torch.randn(1000)[3:777]
    original = ByteRange.of(saved)
    restored = aligned_range(original.nbytes, original.address, 512, CPU)
    restored.tensor().copy_(original.tensor())
    view = restored.tensor().view(torch.float32)
    assert view.data_ptr() % 512 == saved.data_ptr() % 512
    assert torch.equal(view.view(torch.int32), saved.view(torch.int32))
