"""Launcher that runs an unmodified Megatron-LM training script with offloading.

::

    torchrun --nproc-per-node 8 -m tba_offload.megatron.launch pretrain_gpt.py ... --tba-policy policy.yaml

``tba-offload launch pretrain_gpt.py ...`` does the same for one process. The launcher imports Megatron from
the checkout that contains the script.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.errors import ConfigError, MissingDependencyError, TbaError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = "--cpu"
"""Option for tests that trains on a CPU with the ``gloo`` backend. The option must be the first argument."""

_REMEDIES = dict.fromkeys(("psutil", "regex", "six", "tensorboard"), "'tba-offload[scripts]'") | {
    "triton": "triton"
}
"""Packages that training scripts of some Megatron-LM releases import, each with the name to
pass to ``pip install``."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Environment variables for training in one process. For several processes, torchrun sets these variables."""


def prepare(arguments: Sequence[str]) -> Path:
    """Prepare this process for a training script. Afterwards, :func:`run` runs the script.

    Args:
        arguments: Path of the script and its arguments, optionally after ``--cpu``.

    Returns:
        Path of the script.

    Raises:
        ConfigError: The script does not exist.
        MissingDependencyError: megatron-core is not installed.
        UnsupportedError: ``megatron.training``, or a module that it imports, is missing; or ``--cpu`` is used
            on a machine with a GPU.
    """
    if "RANK" not in os.environ:
        os.environ.update({name: os.environ.get(name, value) for name, value in _ALONE.items()})
    on_cpu = list(arguments[:1]) == [CPU]
    path = enter(arguments[on_cpu:])
    if on_cpu:
        from tba_lab.megatron_cpu_scripts import install_for_scripts

        install_for_scripts()
    from tba_offload.megatron.training import install

    try:
        install()
    except ModuleNotFoundError as error:
        raise _why_missing(error.name or "", path) from error
    return path


def enter(arguments: Sequence[str]) -> Path:
    """Set ``sys.argv`` and ``sys.path`` for a training script.

    Returns:
        Path of the script.

    Raises:
        ConfigError: The script does not exist.
    """
    script, *rest = arguments or [""]
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"no script {script!r}. Pass the path of pretrain_gpt.py in a Megatron-LM checkout")
    sys.argv = [str(path), *rest]
    sys.path.insert(0, str(path.resolve().parent))
    return path


def run(script: Path) -> None:
    """Run a training script as ``__main__``. Call :func:`prepare` or :func:`enter` first."""
    runpy.run_path(str(script), run_name="__main__")


def _why_missing(module: str, script: Path) -> TbaError:
    package = module.partition(".")[0]
    if module in {"megatron", "megatron.core"}:
        return MissingDependencyError("megatron-core", f"{script.name}: megatron.training", extra="megatron")
    if module == "megatron.training":
        return UnsupportedError(
            f"{script}: there is no megatron.training beside the script or in the installed megatron-core. "
            "Pass a script at the root of a Megatron-LM checkout, such as pretrain_gpt.py, or add the "
            "checkout to PYTHONPATH"
        )
    remedy = f". Run pip install {_REMEDIES[package]}" if package in _REMEDIES else ""
    return UnsupportedError(
        f"{script.name}: megatron.training needs the module {module}, which is missing{remedy}"
    )


def main() -> None:
    """Run the script that the command line names. If the script cannot start, print a one-line error."""
    try:
        script = prepare(sys.argv[1:])
    except TbaError as error:
        sys.exit(f"tba-offload: {error}")
    run(script)


if __name__ == "__main__":
    main()
