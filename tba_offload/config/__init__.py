"""What the user may set: the options, and which layer gets which placement."""

from __future__ import annotations

from tba_offload.config.options import (
    MOST_TEXT,
    BudgetConfig,
    ConfigLike,
    OffloadConfig,
    Paths,
    StatesConfig,
    StoreConfig,
    WeightsConfig,
    load_config,
    read_config,
    with_directories,
)
from tba_offload.config.values import format_size, parse_size

__all__ = [
    "MOST_TEXT",
    "BudgetConfig",
    "ConfigLike",
    "OffloadConfig",
    "Paths",
    "StatesConfig",
    "StoreConfig",
    "WeightsConfig",
    "format_size",
    "load_config",
    "parse_size",
    "read_config",
    "with_directories",
]
