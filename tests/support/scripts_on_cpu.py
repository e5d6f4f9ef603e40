"""What ranks on a CPU import, with the substitutions that have to come before; see ``conftest.py``."""

from __future__ import annotations

import contextlib
import importlib

import megatron_ranks

from tba_lab.megatron_cpu_scripts import install_for_scripts

install_for_scripts()
for module in megatron_ranks.PRELOADED:
    importlib.import_module(module)
with contextlib.suppress(ModuleNotFoundError):  # only some releases of megatron-core have a training loop
    importlib.import_module("pretrain_tiny")
