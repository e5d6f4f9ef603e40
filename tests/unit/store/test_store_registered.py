"""A kind of store that another project registers: policies, sessions and commands know it by its name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from harness import KIB, MIB, assert_all_given_back
from models import assert_same_history, make_model, train

import tba_offload as tba
from tba_offload.cli import main
from tba_offload.store import register_kind, unregister_kind
from tba_offload.store.host import HostStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tba_offload.config.store import StoreOptions
    from tba_offload.device import Device

POLICY = f"""
store: {{kind: mine, capacity: 64MiB}}
budget: {{in_flight_bytes: {64 * KIB}B}}
min_tensor_bytes: 1KiB
"""


class Mine(HostStore):
    kind = "mine"


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


def test_host_memory_stands_beside_it(opened: list[StoreOptions]) -> None:
    policy = {"store": {"kind": "mine", "host_capacity": "8MiB"}}
    with pytest.warns(tba.NoEffectWarning), tba.attach(make_model(), policy, measure_memory=False) as session:
        assert session.store.kind == "tiered"
    assert [options.host_capacity for options in opened] == [None]


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
    (tmp_path / "needs_more.py").write_text("import no_such_module\n")

    def check(*options: Any) -> Any:
        return CliRunner().invoke(main, [*options, "check", str(policy), "--layers", "2"])

    unknown = check("--import", module)
    assert unknown.exit_code == 2
    assert f"there is no module '{module}' on the path of Python" in unknown.stderr
    assert "must be 'auto', 'gds', 'file' or 'host', not 'mine'" in check().stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert check("--import", module).exit_code == 0
    finally:
        unregister_kind("mine")
        sys.modules.pop(module, None)
    assert isinstance(check("--import", "needs_more").exception, ModuleNotFoundError)
