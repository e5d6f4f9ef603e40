"""Offload activations to NVMe while a large model trains.

::

    import tba_offload as tba

    with tba.attach(model, "policy.yaml") as session:
        for batch in data:
            with session.step():
                loss = model(batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tba_offload.errors import (
    ChecksumError,
    ConfigError,
    HangingError,
    MissingDependencyError,
    NoEffectWarning,
    NothingSavedWarning,
    PatchError,
    RecomputationError,
    RunLogError,
    SavedTensorModifiedError,
    SessionError,
    ShortTransferError,
    StatesAwayError,
    StoreError,
    StoreFullError,
    TbaError,
    TransferError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from tba_offload.attachment import attach
    from tba_offload.config import (
        BudgetConfig,
        OffloadConfig,
        StatesConfig,
        StoreConfig,
        WeightsConfig,
        load_config,
    )
    from tba_offload.config.policy import LayerId, Placement, Policy, Rule
    from tba_offload.device.malloc import keep_freed_pages
    from tba_offload.report.log import StepRecord, read_run_log
    from tba_offload.session import Session, session_of
    from tba_offload.session.step import Step
    from tba_offload.states import OptimizerStates, StatesRecord, offload_optimizer
    from tba_offload.weights import FrozenWeights, offload_frozen

__version__ = "0.1.0"

# Loaded on first use, so that what needs no torch (policies, run logs, plots) starts fast.
_HOMES = {
    "BudgetConfig": "tba_offload.config",
    "FrozenWeights": "tba_offload.weights",
    "LayerId": "tba_offload.config.policy",
    "OffloadConfig": "tba_offload.config",
    "OptimizerStates": "tba_offload.states",
    "Placement": "tba_offload.config.policy",
    "Policy": "tba_offload.config.policy",
    "Rule": "tba_offload.config.policy",
    "Session": "tba_offload.session",
    "StatesConfig": "tba_offload.config",
    "StatesRecord": "tba_offload.states",
    "Step": "tba_offload.session.step",
    "StepRecord": "tba_offload.report.log",
    "StoreConfig": "tba_offload.config",
    "WeightsConfig": "tba_offload.config",
    "attach": "tba_offload.attachment",
    "keep_freed_pages": "tba_offload.device.malloc",
    "load_config": "tba_offload.config",
    "offload_frozen": "tba_offload.weights",
    "offload_optimizer": "tba_offload.states",
    "read_run_log": "tba_offload.report.log",
    "session_of": "tba_offload.session",
}

__all__ = [
    "BudgetConfig",
    "ChecksumError",
    "ConfigError",
    "FrozenWeights",
    "HangingError",
    "LayerId",
    "MissingDependencyError",
    "NoEffectWarning",
    "NothingSavedWarning",
    "OffloadConfig",
    "OptimizerStates",
    "PatchError",
    "Placement",
    "Policy",
    "RecomputationError",
    "Rule",
    "RunLogError",
    "SavedTensorModifiedError",
    "Session",
    "SessionError",
    "ShortTransferError",
    "StatesAwayError",
    "StatesConfig",
    "StatesRecord",
    "Step",
    "StepRecord",
    "StoreConfig",
    "StoreError",
    "StoreFullError",
    "TbaError",
    "TransferError",
    "UnsupportedError",
    "WeightsConfig",
    "attach",
    "keep_freed_pages",
    "load_config",
    "offload_frozen",
    "offload_optimizer",
    "read_run_log",
    "session_of",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
