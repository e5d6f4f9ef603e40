"""Runs an untouched Megatron-LM training script with offloading.

::

    torchrun --nproc-per-node 8 -m tba_offload.megatron.launch pretrain_gpt.py ... --tba-policy policy.yaml

``tba-offload launch pretrain_gpt.py ...`` is the same for one process. The checkout that the script lies in
is the one that is imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tba_offload.errors import MissingDependencyError, TbaError
from tba_offload.megatron.script import enter, run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU = "--cpu"
"""First argument: train on the CPU, with gloo; for trying things out."""


def launch(arguments: Sequence[str]) -> None:
    """Runs a script as ``__main__``, with its arguments.

    Args:
        arguments: ``--cpu`` if wanted, the script, and its arguments.

    Raises:
        ConfigError: There is no such script.
        MissingDependencyError: The script's checkout, or the installed megatron-core, has no
            ``megatron.training``.
        UnsupportedError: ``--cpu`` where there is a GPU.
    """
    run(prepare(arguments))


def prepare(arguments: Sequence[str]) -> Path:
    """Does everything of :func:`launch` except running the script.

    Returns:
        The script.

    Raises:
        TbaError: As :func:`launch`.
    """
    on_cpu = list(arguments[:1]) == [CPU]
    path = enter(arguments[on_cpu:])
    if on_cpu:
        from tba_lab.megatron_cpu_scripts import install_for_scripts

        install_for_scripts()
    from tba_offload.megatron.training import install

    try:
        install()
    except ModuleNotFoundError as error:
        if error.name not in {"megatron", "megatron.core", "megatron.training"}:
            raise
        raise MissingDependencyError(
            "megatron-core", f"{path.name}: megatron.training", extra="megatron"
        ) from error
    return path


def main() -> None:
    """Launches what the command line of this process says; what cannot be launched is one line."""
    try:
        script = prepare(sys.argv[1:])
    except TbaError as error:
        sys.exit(f"tba-offload: {error}")
    run(script)


if __name__ == "__main__":
    main()
