"""Offload activations to NVMe drives while large models train.

::

    import tba_offload as tba

    with tba.attach(model, "fit") as session:  # fit this device, as fast as possible
        for batch in data:
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(session.last)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba_offload.attachment import attach as attach
    from tba_offload.config import BudgetConfig as BudgetConfig
    from tba_offload.config import OffloadConfig as OffloadConfig
    from tba_offload.config import StatesConfig as StatesConfig
    from tba_offload.config import StoreConfig as StoreConfig
    from tba_offload.config import WeightsConfig as WeightsConfig
    from tba_offload.config import load_config as load_config
    from tba_offload.config.policy import LayerId as LayerId
    from tba_offload.config.policy import Policy as Policy
    from tba_offload.config.policy import Rule as Rule
    from tba_offload.device.host_memory import keep_freed_pages as keep_freed_pages
    from tba_offload.errors import ChecksumError as ChecksumError
    from tba_offload.errors import ConfigError as ConfigError
    from tba_offload.errors import NoEffectWarning as NoEffectWarning
    from tba_offload.errors import NothingSavedWarning as NothingSavedWarning
    from tba_offload.errors import RecomputationError as RecomputationError
    from tba_offload.errors import RunLogError as RunLogError
    from tba_offload.errors import SavedTensorModifiedError as SavedTensorModifiedError
    from tba_offload.errors import SessionError as SessionError
    from tba_offload.errors import StatesAwayError as StatesAwayError
    from tba_offload.errors import StoreError as StoreError
    from tba_offload.errors import StoreFullError as StoreFullError
    from tba_offload.errors import TbaError as TbaError
    from tba_offload.errors import TransferError as TransferError
    from tba_offload.errors import UnsupportedError as UnsupportedError
    from tba_offload.placements import Placement as Placement
    from tba_offload.report.log import StepRecord as StepRecord
    from tba_offload.report.log import read_run_log as read_run_log
    from tba_offload.session import Session as Session
    from tba_offload.session import session_of as session_of
    from tba_offload.session.loop import Step as Step
    from tba_offload.states import OptimizerStates as OptimizerStates
    from tba_offload.states import StatesRecord as StatesRecord
    from tba_offload.states import offload_optimizer as offload_optimizer
    from tba_offload.weights import FrozenWeights as FrozenWeights

__version__ = "0.1.0"

_HOMES = {
    name: f"tba_offload.{module}"
    for module, names in {
        "attachment": "attach",
        "config": "BudgetConfig OffloadConfig StatesConfig StoreConfig WeightsConfig load_config",
        "config.policy": "LayerId Policy Rule",
        "device.host_memory": "keep_freed_pages",
        "errors": (
            "ChecksumError ConfigError NoEffectWarning NothingSavedWarning RecomputationError RunLogError "
            "SavedTensorModifiedError SessionError StatesAwayError StoreError StoreFullError TbaError "
            "TransferError UnsupportedError"
        ),
        "placements": "Placement",
        "report.log": "StepRecord read_run_log",
        "session": "Session session_of",
        "session.loop": "Step",
        "states": "OptimizerStates StatesRecord offload_optimizer",
        "weights": "FrozenWeights",
    }.items()
    for name in names.split()
}
"""Module that defines each public name. Modules are imported at the first use of a name, because policies,
run logs and plots do not need torch."""

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
