"""Sizes, figures and layers as they are printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba_offload.formatting import (
    MANY_RANGES,
    grouped,
    layers_by_placement,
    readable_rate,
    readable_size,
    renumbered,
    significant,
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


@given(st.floats(1e-9, 1e15))
def test_three_digits_are_within_half_a_per_cent_and_have_no_exponent(value: float) -> None:
    assert float(significant(value)) == pytest.approx(value, rel=0.005)
    assert "e" not in significant(value)


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


def test_numbers_that_do_not_follow_one_another_are_no_range() -> None:
    names = [f"decoder.layers.{number}.block" for number in (2, 3, 8, 9)]
    assert [group.name for group in grouped(names, "oooo")] == [
        "decoder.layers.2-3.block",
        "decoder.layers.8-9.block",
    ]


def test_layers_of_several_stacks_and_layers_without_a_number_have_their_names() -> None:
    two = [f"{stack}.layers.{number}" for stack in ("encoder", "decoder") for number in range(2)]
    assert [group.numbers for group in grouped(two, "oooo")] == ["encoder.layers.0-1", "decoder.layers.0-1"]
    assert [group.numbers for group in grouped(["first", "second"], "oo")] == ["first", "second"]


@given(st.lists(st.sampled_from("ok"), max_size=12))
def test_every_layer_is_in_one_group(alike: list[str]) -> None:
    groups = grouped(LLAMA[: len(alike)], alike)
    found = [(group.first + place, alike[group.first]) for group in groups for place in range(group.size)]
    assert found == list(enumerate(alike))


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


def test_layers_that_are_repeated_have_names_of_their_stack() -> None:
    chosen = [layer * 12 // 48 for layer in range(48)]
    assert renumbered(LLAMA, chosen) == tuple(f"model.layers.{layer}" for layer in range(48))
    stage = [f"decoder.layers.{layer}" for layer in (6, 7)]  # of a pipeline, its layers numbered over all
    assert renumbered(stage, [0, 0, 1]) == ("decoder.layers.6", "decoder.layers.7", "decoder.layers.8")
    two = ["encoder.0", "decoder.0"]
    assert renumbered(two, [0, 0, 1, 1]) == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    assert renumbered(["first", "last"], [0, 0, 1]) == ("first", "first (2)", "last")
