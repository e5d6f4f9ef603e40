"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch is imported, and for the processes that tests start: see pytest_configure.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test wants two threads, the one that waits leaves its core to other processes.
os.environ["OMP_WAIT_POLICY"] = "passive"

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator

    from warm import Warm


# Where an assertion of a module that tests import fails, pytest shows the values too, if it knows the module
# before it is imported: ``compiled`` is by the plugin ``lagging``.
HELPERS = {path.stem for path in (Path(__file__).parent / "support").glob("*.py")} - {"compiled"}
pytest.register_assert_rewrite(*HELPERS, "store_contract")


def pytest_configure() -> None:
    # One thread everywhere: the tests must not depend on how many cores a machine has and who else uses them,
    # and models as small as theirs gain nothing from a second thread, which waits busily for the first.
    torch.set_num_threads(1)
    # Nor on how long an example takes on a busy one, or on luck: SEARCH=1 looks for examples that are new.
    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize="SEARCH" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("repeatable")


def pytest_report_header() -> str:
    if "FULL" in os.environ:
        return "lane: all tests"
    if float(os.environ.get("SAMPLE", "0")):
        sample = f"SAMPLE={os.environ['SAMPLE']} SEED={os.environ.get('SEED', '0')}"
        return f"lane: main, and a sample of the others ({sample})"
    return "lane: main; FULL=1 runs all tests, SAMPLE=10 SEED=1 ten per cent of the others"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests marked ``full`` run only with ``FULL``, in a sample, or named on the command line.
    named = [argument for argument in config.args if "::" in argument]
    left = {item for item in items if not is_wanted(item, named)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    # The one place that decides it: what is marked ``gpu`` runs wherever there is one.
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def is_wanted(item: pytest.Item, named: Iterable[str]) -> bool:
    """Whether a run takes a test: of the main lane, of a sample of the others, or by its name.

    A sample has some per cent of all, others for each seed.
    """
    if item.get_closest_marker("full") is None or "FULL" in os.environ:
        return True
    if any(is_named(item, argument) for argument in named):
        return True
    share, seed = float(os.environ.get("SAMPLE", "0")), int(os.environ.get("SEED", "0"))
    return zlib.crc32(f"{seed} {item.nodeid}".encode()) % 10000 < share * 100


def is_named(item: pytest.Item, argument: str) -> bool:
    path, _, name = argument.partition("::")
    if (item.config.invocation_params.dir / path).resolve() != item.path:
        return False
    own = item.nodeid.partition("::")[2]
    return own == name or own.startswith((f"{name}[", f"{name}::"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # megatron-core warns when it is first imported: no fault of the test that comes first in a process.
    if item.get_closest_marker("megatron") is not None:
        from tba_lab.megatron_cpu import require_core

        require_core("a test of the integration")


def pytest_collection_finish() -> None:
    # What was imported and collected stays to the end; the collector, which many tests call, may skip it.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_was_there_before_is_not_collected_again() -> None:
    """Modules that tests import late make each collection, which many tests call, take tenths of a second."""
    gc.collect()
    gc.freeze()


def python_with(*modules: str) -> Iterator[Warm]:
    """Runs programs as the interpreter does, but that modules have been imported."""
    from children import environment
    from warm import warm

    with warm(*modules, env=environment()) as found:
        yield found


@pytest.fixture(scope="session")
def python_with_torch() -> Iterator[Warm]:
    """With what checkpoints need."""
    yield from python_with("torch", "torch._dynamo")


@pytest.fixture(scope="session")
def python_with_megatron() -> Iterator[Warm]:
    yield from python_with("megatron.core.models.gpt", "torch._dynamo")


@pytest.fixture(scope="session")
def python_with_scripts() -> Iterator[Warm]:
    """For a CPU and with Megatron's training loop, where there is one."""
    yield from python_with("scripts_on_cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For what must be the same where several threads compute."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only kernels of a GPU that give the same bits every time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    import fake_kvikio

    from tba_offload.store import gds

    monkeypatch.setattr(gds, "CuFile", fake_kvikio.CuFile)
    for name in fake_kvikio.MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield fake_kvikio.install()
    for name in fake_kvikio.MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test opened it closes; a failure must not spread to the tests that follow."""
    yield
    deadline = time.monotonic() + 60  # a busy machine may leave them waiting for a core
    while _own_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    if left := _own_threads():
        from tba_offload.store.multi import close_all

        close_all()
        pytest.fail(f"threads are left: {left}")


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tba-")]
