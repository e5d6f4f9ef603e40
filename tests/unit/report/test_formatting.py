"""Sizes, figures and layers as they are printed."""

from __future__ import annotations

import pytest

from tba_offload.formatting import (
    MANY_RANGES,
    grouped,
    layers_by_placement,
    readable_rate,
    readable_size,
)

MIB = 2**20
LLAMA = [f"model.layers.{layer}" for layer in range(12)]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1536, "1.50 KiB"),
        (int(41.6 * MIB), "41.6 MiB"),
        (284 * MIB, "284 MiB"),
        (1000 * MIB, "1000 MiB"),
        (12 * 2**30, "12.0 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_a_size_is_read_at_a_glance(nbytes: int, text: str) -> None:
    assert readable_size(nbytes) == text


def test_a_rate_is_in_the_units_of_drives() -> None:
    assert [readable_rate(rate) for rate in (1.482e9, 4e8, 12e3, 0)] == [
        "1.48 GB/s",
        "400 MB/s",
        "12.0 KB/s",
        "0 B/s",
    ]


def test_equal_layers_that_follow_one_another_are_one_group() -> None:
    groups = grouped(LLAMA, "oooooooookkk")
    assert [tuple(group) for group in groups] == [
        ("0-8", "model.layers.0-8", 0, 9),
        ("9-11", "model.layers.9-11", 9, 3),
    ]


def test_layers_of_several_stacks_and_layers_without_a_number_have_their_names() -> None:
    two = [f"{stack}.layers.{number}" for stack in ("encoder", "decoder") for number in range(2)]
    assert [group.numbers for group in grouped(two, "oooo")] == ["encoder.layers.0-1", "decoder.layers.0-1"]
    assert [group.numbers for group in grouped(["first", "second"], "oo")] == ["first", "second"]


@pytest.mark.parametrize(
    ("placements", "said"),
    [
        (["offload"] * 10 + ["keep"] * 2, "offload layers 0-9, keep layers 10-11"),
        (["keep"] * 12, "keep all 12 layers"),
        (["keep"], "keep the layer"),
        (["offload", "offload-remat", "offload"], "offload layers 0, 2, offload-remat layer 1"),
        (["offload", "recompute"] * 6, "offload 6 layers from 0 to 10, recompute 6 layers from 1 to 11"),
        (["offload", "keep"] * MANY_RANGES, "offload layers 0, 2, 4, 6, keep layers 1, 3, 5, 7"),
    ],
)
def test_what_is_done_with_which_layers_is_one_line(placements: list[str], said: str) -> None:
    assert layers_by_placement(LLAMA[: len(placements)], placements) == said
