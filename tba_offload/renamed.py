"""Old names and words, and what they are called now.

An old word of a policy, a flag or a run log, and an old name of Python, go on working where there is a new
one; :class:`~tba_offload.errors.RenamedWarning` says so, once for each in a process. An old name without a
new one raises an error that says where to look.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from tba_offload.errors import RenamedWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

PLACEMENTS = {"selective": "offload-remat"}
"""Old word of a placement: the new one. The old one could be taken for Megatron's selective recomputation."""

MODULES: dict[str, tuple[str, ...]] = {
    "tba_offload.capture.layers": ("tba_offload.layers.stack", "tba_offload.layers.graph"),
    "tba_offload.capture.recompute": ("tba_offload.layers.checkpoint",),
    "tba_offload.capture.selective": ("tba_offload.capture.rematerialize",),
    "tba_offload.demo": ("tba_lab.demo",),
    "tba_offload.demo.console": ("tba_lab.demo.console",),
    "tba_offload.demo.race": ("tba_lab.demo.race",),
    "tba_offload.demo.run": ("tba_lab.demo.run",),
    "tba_offload.demo.text": ("tba_lab.demo.text",),
    "tba_offload.demo.trainer": ("tba_lab.demo.trainer",),
    "tba_offload.device.sums": ("tba_offload.device.checksum",),
    "tba_offload.doctor": ("tba_offload.store.doctor",),
    "tba_offload.forecast": ("tba_offload.what_if",),
    "tba_offload.megatron.cpu": ("tba_lab.megatron_cpu",),
    "tba_offload.megatron.cpu_scripts": ("tba_lab.megatron_cpu_scripts",),
    "tba_offload.megatron.gpt": ("tba_lab.gpt",),
    "tba_offload.plan.plan": ("tba_offload.plan.model",),
    "tba_offload.plan.planner": (
        "tba_offload.plan.search",
        "tba_offload.plan.goals",
        "tba_offload.plan.describe",
        "tba_offload.plan.model",
        "tba_offload.plan.tuning",
    ),
    "tba_offload.plan.simulator": (
        "tba_offload.plan.simulate",
        "tba_offload.plan.window",
        "tba_offload.plan.traffic",
    ),
    "tba_offload.planning": (
        "tba_offload.adapt.controller",
        "tba_offload.adapt.agreement",
        "tba_offload.plan.tuning",
    ),
    "tba_offload.policy": ("tba_offload.config.policy",),
    "tba_offload.profiling": ("tba_offload.adapt.profiler",),
    "tba_offload.store.choice": ("tba_offload.store.probe",),
    "tba_offload.store.directory": ("tba_offload.store.run_file",),
    "tba_offload.store.queued": ("tba_offload.store.engine", "tba_offload.store.transfers"),
    "tba_offload.transfer.books": ("tba_offload.transfer.ledger", "tba_offload.plan.window"),
    "tba_offload.transfer.patience": ("tba_offload.transfer.watchdog", "tba_offload.store.base"),
    "tba_offload.transfer.record": ("tba_offload.transfer.storage",),
}
"""Old module: those that its names stand in now, the first of them for what is nowhere."""

NAMES: dict[str, dict[str, str]] = {
    "tba_offload.capture.hooks": {"RELEARN_AFTER": "tba_offload.capture.registry.RELEARN_AFTER"},
    "tba_offload.capture.identity": {"look": "tba_offload.capture.identity.viewed"},
    "tba_offload.capture.selective": {
        "SelectiveHooks": "tba_offload.capture.rematerialize.RematerializingHooks",
    },
    "tba_offload.capture.trace": {"Fate": "tba_offload.capture.trace.Treatment"},
    "tba_offload.forecast": {"EVENT": "tba_offload.report.run_log.PLAN"},
    "tba_offload.device": {"CudaDevice": "tba_offload.device.streams.Accelerator"},
    "tba_offload.device.memory": {
        "CudaMeter": "tba_offload.device.memory.AllocatorMeter",
        "FAST_ALLOCATOR": "tba_offload.device.malloc.FAST_ALLOCATOR",
        "LiveBytes": "tba_offload.device.live_bytes.LiveBytes",
        "keep_freed_pages": "tba_offload.device.malloc.keep_freed_pages",
    },
    "tba_offload.device.streams": {"CudaDevice": "tba_offload.device.streams.Accelerator"},
    "tba_offload.megatron.training": {"CURVES": "tba_offload.report.curves.CURVES"},
    "tba_offload.plan.bandwidth": {
        "SPILL_BYTES": "tba_offload.plan.window.SPILL_BYTES",
        "SPILL_SHARE": "tba_offload.plan.window.SPILL_SHARE",
    },
    "tba_offload.planning": {"AutoPlanner": "tba_offload.adapt.controller.Controller"},
    "tba_offload.report.rok": {
        "Unit": "tba_offload.report.points.Unit",
        "draw_frontier": "tba_offload.report.plans.draw_frontier",
        "point": "tba_offload.report.points.point",
        "points": "tba_offload.report.points.points",
    },
    "tba_offload.report.run_log": {
        "RunLogWriter": "tba_offload.report.log_writer.RunLogWriter",
        "read_run_log": "tba_offload.report.log_reader.read_run_log",
    },
    "tba_offload.session": {
        "ConfigLike": "tba_offload.config.ConfigLike",
        "Step": "tba_offload.session.step.Step",
        "read_config": "tba_offload.config.read_config",
    },
    "tba_offload.transfer.books": {"Books": "tba_offload.transfer.ledger.Ledger"},
    "tba_offload.transfer.patience": {"Patience": "tba_offload.transfer.watchdog.Watchdog"},
}
"""Module, old or of today: its old names that are called otherwise now, and what they are."""

_told: set[str] = set()


def tell(old: str, new: str) -> None:
    """Says, once in a process, that something has another name now.

    Args:
        old: What was written.
        new: What to write instead.
    """
    if old not in _told:
        _told.add(old)
        warnings.warn(f"{old} is called {new} now; the old name is still accepted", RenamedWarning, 3)


def placement(word: str) -> str:
    """Return the word of today for a placement; one that is not old stays as it is."""
    new = PLACEMENTS.get(word)
    if new is None:
        return word
    tell(f"the placement {word!r}", repr(new))
    return new


def names_of(module: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module, which finds its old names."""
    return partial(_attribute, module)


def _attribute(module: str, name: str) -> object:
    places = [f"{place}.{name}" for place in MODULES.get(module, ())]
    if (renamed := NAMES.get(module, {}).get(name)) is not None:
        places = [renamed]
    if not name.startswith("_"):
        for place in places:
            home, _, attribute = place.rpartition(".")
            value = getattr(importlib.import_module(home), attribute, None)
            if value is not None:
                tell(f"{module}.{name}", place)
                return value
    what = f"module {module!r} has no attribute {name!r}"
    if module in MODULES:
        what += f" any more; what it had is in {', '.join(MODULES[module])}"
    raise AttributeError(what, name=name)


class _OldModules(MetaPathFinder, Loader):
    """Makes modules of the old names, which find in others what is asked of them."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        has_parts = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, origin="an old name", is_package=has_parts)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"An old name of {', '.join(MODULES[module.__name__])}."
        module.__dict__["__getattr__"] = names_of(module.__name__)


def find_old_modules() -> None:
    """From now on old modules can be imported; others are found before them, and as fast as ever."""
    if not any(type(finder).__name__ == _OldModules.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())
