"""What an activation takes does not grow with their number: a short form of ``benchmarks/scale.py``."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest
from places import BENCHMARKS

if TYPE_CHECKING:
    from pathlib import Path

sys.path.append(str(BENCHMARKS))  # after all others: it has an io.py

import scale

OBJECTS = 20
"""Objects of an activation that the cyclic collector looks at, those of its share of a small layer included.

It goes through all that are alive whenever a quarter more have been made: in large steps each object costs as
much as five calls.
"""


@pytest.mark.filterwarnings("ignore::tba_offload.errors.NothingSavedWarning")
def test_an_activation_takes_no_more_where_there_are_many(tmp_path: Path) -> None:
    few = scale.counts_of(scale.Size(33, 1), tmp_path)
    many = scale.counts_of(scale.Size(60, 10), tmp_path)
    assert many.calls <= 1.1 * few.calls  # extents that are given back join their neighbours
    assert many.nbytes <= 1.05 * few.nbytes
    assert many.objects <= OBJECTS


@pytest.mark.filterwarnings("ignore::tba_offload.errors.NothingSavedWarning")
def test_a_step_leaves_no_object_that_only_the_collector_could_free(tmp_path: Path) -> None:
    lane = scale.Lane(scale.Size(33, 2), scale.directories_in(tmp_path, "lane"))
    lane.seconds()
    gc.collect()
    gc.disable()
    try:
        lane.seconds()
        assert gc.collect() == 0
    finally:
        gc.enable()
        lane.close()
