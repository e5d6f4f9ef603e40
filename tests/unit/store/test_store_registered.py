"""A kind of store that another project registers: policies, sessions and commands know it by its name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import MIB, assert_all_given_back
from models import assert_same_history, make_model, train

import tba_offload as tba
from tba_offload.device import READY
from tba_offload.store import Store, register_kind, unregister_kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.device import ByteRange, Device
    from tba_offload.store import Extent

POLICY: dict[str, Any] = {
    "store": {"kind": "shelf", "capacity": "64MiB"},
    "budget": {"in_flight_bytes": "16KiB"},
    "min_tensor_bytes": "1KiB",
}


class Shelf(Store):
    """A store that keeps tensors, and fails with what a test puts into ``failures``, as it is."""

    kind = name = "shelf"

    def __init__(self, device: Device, capacity: int | None = None) -> None:
        self.device, self.capacity = device, capacity
        self.held: dict[int, torch.Tensor] = {}
        self.failures: dict[str, list[BaseException]] = {"write": [], "read": []}

    @property
    def description(self) -> dict[str, object]:
        return {"kind": self.kind}

    def write(self, extent: Extent, source: ByteRange) -> None:
        self._fail("write")
        kept = torch.empty(extent.nbytes, dtype=torch.uint8)
        self.device.copy(kept, source.tensor(), READY)
        self.held[extent.offset] = kept

    def read(self, extent: Extent, target: ByteRange) -> None:
        self._fail("read")
        self.device.copy(target.tensor(), self.held[extent.offset], READY)

    def _fail(self, verb: str) -> None:
        if self.failures[verb]:
            raise self.failures[verb].pop()


@pytest.fixture
def opened() -> Iterator[list[Shelf]]:
    found: list[Shelf] = []

    def opener(config: tba.StoreConfig, *, device: Device) -> Shelf:
        found.append(Shelf(device, config.capacity))
        return found[-1]

    register_kind("shelf", opener)
    yield found
    unregister_kind("shelf")


def test_a_session_trains_through_it(opened: list[Shelf], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(json.dumps(POLICY))
    expected, model = train(make_model()), make_model()
    with tba.attach(model, policy, measure_memory=False) as session:
        assert_same_history(train(model, session), expected)
        assert session.store.kind == "shelf"
        assert session.records[-1].offloaded_bytes > 0
        assert_all_given_back(session)
    assert [store.capacity for store in opened] == [64 * MIB]


def test_a_fault_of_the_program_is_no_fault_of_a_drive(opened: list[Shelf]) -> None:
    model = make_model()
    with tba.attach(model, POLICY, measure_memory=False) as session:
        opened[0].failures["write"].append(KeyError("shelf"))
        with pytest.raises(tba.TransferError, match="KeyError"):
            train(model, session)
        assert session.store.take_outages() == []


def test_a_name_is_given_once_and_forgotten_names_are_unknown(opened: list[Shelf]) -> None:
    for name in ("file", "shelf"):
        with pytest.raises(ValueError, match=f"'{name}' is already registered"):
            register_kind(name, lambda _, *, device: Shelf(device))
    unregister_kind("shelf")
    unregister_kind("file")  # stays
    with pytest.raises(tba.ConfigError, match="must be 'auto', 'gds', 'file' or 'host', not 'shelf'"):
        tba.StoreConfig(kind="shelf")
    assert not opened
