"""A script as if the interpreter had been started with it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tba_offload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
