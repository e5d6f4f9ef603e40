"""The example for torchtitan, run without the package or with it, on one rank: a program.

    python titan_run.py NAME FILE OPTION...

``NAME`` is "without" or "with"; what came out is left in ``FILE``. The options are those of the example.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys

import torch
from example_ranks import do_without, local, steps_of
from places import EXAMPLES


def main() -> None:
    name, file, *options = sys.argv[1:]
    if name == "without":
        do_without()
    example = str(EXAMPLES / "train_torchtitan.py")
    sys.argv = [example, *options]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    peaks = kept_when_they_are_reset()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = runpy.run_path(example, run_name="__main__")
    is_ours = "tba_offload.session.session" in sys.modules
    assert is_ours is (name == "with"), sorted(sys.modules)
    (model,) = names["trainer"].model_parts
    found = {
        "printed": printed.getvalue(),
        "parameters": {key: local(parameter).cpu() for key, parameter in model.named_parameters()},
        "kinds": sorted({type(parameter.data).__name__ for parameter in model.parameters()}),
        "steps": steps_of(names) if is_ours else [],
        "peak": max(*peaks, torch.cuda.max_memory_allocated()),
    }
    torch.save(found, file)


def kept_when_they_are_reset() -> list[int]:
    """Peaks of the allocator, which torchtitan and the package both reset, in a list that grows."""
    peaks = [0]
    reset = torch.cuda.reset_peak_memory_stats

    def resetting(*arguments: object) -> None:
        peaks.append(torch.cuda.max_memory_allocated())
        reset(*arguments)

    torch.cuda.reset_peak_memory_stats = resetting
    return peaks


if __name__ == "__main__":
    main()
