"""An example run without the package or with it, on the rank that a launcher gives it or alone: a program.

    python example_on_gpu.py NAME FILE EXAMPLE OPTION...

``NAME`` is "without" or "with"; what came out is left in ``FILE``. The options are those of the example.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch
from example_ranks import do_without, local, steps_of
from places import EXAMPLES, ROOT, SUPPORT

if TYPE_CHECKING:
    from pathlib import Path

# ---- what tests ask for --------------------------------------------------------------------------


def outcomes(
    directory: Path, name: str, *options: str, launcher: tuple[str, ...] = (sys.executable,)
) -> list[dict[str, Any]]:
    """What came out of an example without the package, once more without it, and with it, all at once.

    Args:
        directory: A folder for each of the runs is made in it, where also their output is.
        name: Of the example.
        options: Of the example.
        launcher: What runs a Python program, and its options.
    """
    found_here = [str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(found_here),
        "HF_HOME": str(directory),
        "HF_HUB_OFFLINE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    example = str(EXAMPLES / f"train_{name}.py")
    runs = {}
    try:
        for run, kind in (("plain", "without"), ("again", "without"), ("found", "with")):
            (directory / run).mkdir()
            out = str(directory / run / "out.pt")
            command = [*launcher, __file__, kind, out, example, *options]
            with (directory / run / "log.txt").open("w") as log:
                runs[run] = subprocess.Popen(
                    command,
                    cwd=directory / run,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        codes = {run: process.wait(timeout=200) for run, process in runs.items()}
    finally:
        for process in runs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a launcher has started too
            process.wait()
    for run, code in codes.items():
        assert code == 0, (directory / run / "log.txt").read_text()[-6000:]
    return [torch.load(directory / run / "out.pt") for run in runs]


# ---- the program ---------------------------------------------------------------------------------

ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def main() -> None:
    name, file, example, *options = sys.argv[1:]
    if name == "without":
        do_without()
    sys.argv = [example, *options]
    os.environ |= ALONE | os.environ
    peaks = kept_when_they_are_reset()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = runpy.run_path(example, run_name="__main__")
    is_ours = "tba_offload.session.session" in sys.modules
    assert is_ours is (name == "with"), sorted(sys.modules)
    trainer = names.get("trainer")
    (model,) = trainer.model_parts if hasattr(trainer, "model_parts") else [names["model"]]
    found = {
        "printed": printed.getvalue(),
        "parameters": {key: local(parameter).cpu() for key, parameter in model.named_parameters()},
        "kinds": sorted({type(parameter.data).__name__ for parameter in model.parameters()}),
        "wrapper": type(getattr(trainer, "model_wrapped", model)).__name__,
        "steps": steps_of(names) if is_ours else [],
        "peak": max(*peaks, torch.cuda.max_memory_allocated()),
    }
    torch.save(found, file)


def kept_when_they_are_reset() -> list[int]:
    """Peaks of the allocator, which a trainer and the package both reset, in a list that grows."""
    peaks = [0]
    reset = torch.cuda.reset_peak_memory_stats

    def resetting(*arguments: object) -> None:
        peaks.append(torch.cuda.max_memory_allocated())
        reset(*arguments)

    torch.cuda.reset_peak_memory_stats = resetting
    return peaks


if __name__ == "__main__":
    main()
