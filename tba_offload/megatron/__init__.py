"""Everything that knows Megatron; no other part of the package names it.

megatron-core is optional: this package imports without it, and whatever needs it says what to install.
"""

from __future__ import annotations

import importlib
import warnings

from tba_offload.errors import MissingDependencyError

_MODULES = (
    "megatron.core",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.bert.bert_layer_specs",
    "megatron.core.datasets.gpt_dataset",
)


def require_core(purpose: str) -> None:
    """Import megatron-core quietly, or say that it is missing.

    Importing it warns about optional accelerators that are absent (Apex, Transformer Engine) and about
    its own use of deprecated functions. Neither says anything about the run, so they are not passed on;
    what megatron-core warns about later is.

    Args:
        purpose: What needs megatron-core, for the message.

    Raises:
        MissingDependencyError: megatron-core is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"megatron\.|torch\.jit\.")
            for name in _MODULES:
                importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise MissingDependencyError("megatron-core", purpose, extra="megatron") from error
