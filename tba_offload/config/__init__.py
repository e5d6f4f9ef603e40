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
    format_size,
    load_config,
    parse_size,
    read_config,
    with_directories,
)

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
