"""A kind of store that another project registers: policies, sessions and commands know it by its name."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from harness import KIB, MIB, assert_all_given_back
from models import assert_same_history, make_model, train

import tba_offload as tba
from tba_offload.cli import main
from tba_offload.store import register_kind, unregister_kind
from tba_offload.store.engine import QueuedStore
from tba_offload.store.host import HostStore
from tba_offload.store.options import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.device import ByteRange, Device, Event
    from tba_offload.store.base import Extent

POLICY = f"""
store: {{kind: mine, capacity: 64MiB}}
budget: {{in_flight_bytes: {64 * KIB}B}}
min_tensor_bytes: 1KiB
"""


class Mine(HostStore):
    kind = "mine"


class Shelf:
    """A backend that keeps tensors, and fails with what a test puts into ``failures``, as it stands."""

    name, alignment, size = "shelf", 1, 0

    def __init__(self, device: Device) -> None:
        self.device = device
        self.held: dict[int, torch.Tensor] = {}
        self.failures: dict[str, list[BaseException]] = {"write": [], "read": []}

    def grow(self, size: int) -> None:
        self.size = size

    def move_out(self, extent: Extent, source: ByteRange, after: Event) -> None:
        self._fail("write")
        kept = torch.empty(extent.nbytes, dtype=torch.uint8)
        self.device.copy(kept, source.tensor(), after)
        self.held[extent.offset] = kept

    def move_in(self, extent: Extent, target: ByteRange, after: Event, *, padded: bool) -> None:
        self._fail("read")
        self.device.copy(target.tensor(), self.held[extent.offset], after)

    def _fail(self, verb: str) -> None:
        if self.failures[verb]:
            raise self.failures[verb].pop()

    def digest(self, data: torch.Tensor) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class ShelfStore(QueuedStore):
    kind = "shelf"

    def __init__(self, *, device: Device) -> None:
        self.shelf = Shelf(device)
        super().__init__(self.shelf, StoreOptions(readers=1, writers=1), drive=0)

    @property
    def description(self) -> dict[str, object]:
        return {"kind": self.kind}


@pytest.fixture
def opened() -> Iterator[list[StoreOptions]]:
    """The options with which stores of the kind ``mine`` were opened."""
    found: list[StoreOptions] = []

    def opener(options: StoreOptions, *, device: Device) -> Mine:
        found.append(options)
        return Mine(options.capacity, device=device)

    register_kind("mine", opener)
    yield found
    unregister_kind("mine")


def test_a_session_trains_through_it(opened: list[StoreOptions], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    expected, model = train(make_model()), make_model()
    with tba.attach(model, policy, measure_memory=False) as session:
        assert_same_history(train(model, session), expected)
        assert isinstance(session.store, Mine)
        assert session.report()[-1].offloaded_bytes > 0
        assert_all_given_back(session)
    (options,) = opened
    assert (options.kind, options.capacity) == ("mine", 64 * MIB)


@pytest.fixture
def shelf() -> Iterator[dict[str, object]]:
    """A policy whose store has no errors of its own but those of the system."""
    register_kind("shelf", lambda _options, *, device: ShelfStore(device=device))
    yield {
        "store": {"kind": "shelf"},
        "budget": {"in_flight_bytes": f"{16 * KIB}B"},
        "min_tensor_bytes": "1KiB",
    }
    unregister_kind("shelf")


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "Input/output error"), MemoryError()], ids=repr)
def test_a_read_that_fails_with_an_error_of_the_system_is_made_again(
    shelf: dict[str, object], failure: BaseException
) -> None:
    expected, model = train(make_model()), make_model()
    with tba.attach(model, shelf, measure_memory=False) as session:
        assert isinstance(session.store, ShelfStore)
        session.store.shelf.failures["read"].append(failure)
        assert_same_history(train(model, session), expected)
        assert not session.store.shelf.failures["read"]
        assert session.report()[-1].fallback_kept_bytes == 0
        assert_all_given_back(session)


def test_a_fault_of_the_program_is_no_fault_of_a_drive(shelf: dict[str, object]) -> None:
    model = make_model()
    with tba.attach(model, shelf, measure_memory=False) as session:
        assert isinstance(session.store, ShelfStore)
        session.store.shelf.failures["write"].append(KeyError("shelf"))
        with pytest.raises(tba.TransferError, match="KeyError"):
            train(model, session)
        assert session.store.take_outages() == []


def test_a_name_is_given_once_and_forgotten_names_are_unknown(opened: list[StoreOptions]) -> None:
    for name in ("file", "mine"):
        with pytest.raises(ValueError, match=f"'{name}' is known already"):
            register_kind(name, Mine)
    unregister_kind("mine")
    unregister_kind("file")  # stays
    with pytest.raises(tba.ConfigError, match="must be 'auto', 'gds', 'file' or 'host', not 'mine'"):
        tba.StoreConfig(kind="mine")
    assert not opened


def test_commands_import_what_registers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, module = tmp_path / "policy.yaml", "registers_mine"
    policy.write_text(POLICY)
    code = "from tba_offload import store\nstore.register_kind('mine', store.open_store)\n"
    (tmp_path / f"{module}.py").write_text(code)

    def check(*options: Any) -> Any:
        return CliRunner().invoke(main, [*options, "check", str(policy), "--layers", "2"])

    unknown = check("--import", module)
    assert unknown.exit_code == 2
    assert f"'{module}' cannot be imported: No module named '{module}'; name its folder" in unknown.stderr
    assert "must be 'auto', 'gds', 'file' or 'host', not 'mine'" in check().stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert check("--import", module).exit_code == 0
    finally:
        unregister_kind("mine")
        sys.modules.pop(module, None)
