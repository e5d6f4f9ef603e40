"""Runs an untouched Megatron-LM training script with offloading.

::

    torchrun --nproc-per-node 8 -m tba_offload.megatron.launch pretrain_gpt.py ... --tba-policy policy.yaml

``tba-offload launch pretrain_gpt.py ...`` is the same for one process. The checkout that the script lies in
is the one that is imported.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.errors import ConfigError, MissingDependencyError, TbaError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = "--cpu"
"""First argument: train on the CPU, with gloo; for trying things out."""

_REMEDIES = dict.fromkeys(("psutil", "regex", "six", "tensorboard"), "'tba-offload[scripts]'") | {
    "triton": "triton"
}
"""Packages that scripts of some releases import, and what to install for them."""


def launch(arguments: Sequence[str]) -> None:
    """Run a script as ``__main__``, with its arguments.

    Args:
        arguments: ``--cpu`` if wanted, the script, and its arguments.

    Raises:
        ConfigError: There is no such script.
        MissingDependencyError: megatron-core is not installed.
        UnsupportedError: There is no ``megatron.training``, or a module that it imports is missing; or
            ``--cpu`` where there is a GPU.
    """
    run(prepare(arguments))


def prepare(arguments: Sequence[str]) -> Path:
    """Do everything of :func:`launch` except running the script.

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
        if (explained := _why_missing(error.name or "", path)) is None:
            raise
        raise explained from error
    return path


def enter(arguments: Sequence[str]) -> Path:
    """Set the command line and the module path for a script and its arguments.

    Returns:
        The script.

    Raises:
        ConfigError: There is no such script.
    """
    script, *rest = arguments or [""]
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"there is no script {script!r}; name pretrain_gpt.py of a Megatron-LM checkout")
    sys.argv = [str(path), *rest]
    sys.path.insert(0, str(path.resolve().parent))
    return path


def run(script: Path) -> None:
    """Run a script that was entered as ``__main__``."""
    runpy.run_path(str(script), run_name="__main__")


def _why_missing(module: str, script: Path) -> TbaError | None:
    """Return what to do about a module that is missing; ``None`` if it is one of the package itself."""
    package = module.partition(".")[0]
    if module in {"megatron", "megatron.core"}:
        return MissingDependencyError("megatron-core", f"{script.name}: megatron.training", extra="megatron")
    if module == "megatron.training":
        return UnsupportedError(
            f"{script}: there is no megatron.training beside it, nor in the megatron-core that is installed; "
            "give a script at the root of a Megatron-LM checkout, such as pretrain_gpt.py, or name the "
            "checkout in PYTHONPATH"
        )
    if package in {"", "megatron", "tba_offload", "tba_lab"}:
        return None
    remedy = f"; pip install {_REMEDIES[package]}" if package in _REMEDIES else ""
    return UnsupportedError(
        f"{script.name}: megatron.training needs the module {module}, which is missing{remedy}"
    )


def main() -> None:
    """Launch what the command line of this process says; what cannot be launched is one line."""
    try:
        script = prepare(sys.argv[1:])
    except TbaError as error:
        sys.exit(f"tba-offload: {error}")
    run(script)


if __name__ == "__main__":
    main()
