"""An example run without the package and with it, on one rank or several: a program.

    python example_ranks.py EXAMPLE RANKS DIRECTORY POLICY OPTION...

The options are those of the example. Each rank leaves what came out in ``DIRECTORY/without-RANK.pt`` and
``DIRECTORY/with-RANK.pt``. Where the package is not to be used, what it is asked for does nothing.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tba_offload as tba

FIGURES = ("offloaded_bytes", "read_bytes", "forwarded_bytes", "kept_bytes", "scopes")
FIGURES += ("left_alone_scopes", "recomputed_scopes")


def main() -> None:
    example, ranks, directory, policy, *options = sys.argv[1:]
    os.chdir(directory)
    torch.set_num_threads(1)
    exec(compile(imports_of(Path(example)), example, "exec"), {})  # here, and not in each rank
    gc.collect()
    gc.freeze()  # or each collection in a rank would copy all pages
    fork = multiprocessing.get_context("fork")
    for name in ("without", "with"):
        # As torchrun has it: the ranks meet at a store that was there before them, so that its port is free.
        meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        place = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(meeting.port),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        arguments = [example, *options, "--placement", policy]
        processes = [
            fork.Process(target=run_rank, args=(name, rank, place if int(ranks) > 1 else {}, arguments))
            for rank in range(int(ranks))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(1)


def imports_of(example: Path) -> ast.Module:
    tree = ast.parse(example.read_text(encoding="utf-8"))
    return ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])


def run_rank(name: str, rank: int, place: dict[str, str], arguments: list[str]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if place:
        os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if name == "without":
        do_without()
    sys.argv = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = runpy.run_path(arguments[0], run_name="__main__")
    parameters = {key: local(parameter) for key, parameter in names["model"].named_parameters()}
    kinds = {type(parameter.data).__name__ for parameter in names["model"].parameters()}
    steps = steps_of(names) if name == "with" else []
    found = {"printed": printed.getvalue(), "parameters": parameters, "kinds": kinds, "steps": steps}
    torch.save(found, f"{name}-{rank}.pt")


def local(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has of it, as FSDP2, ZeRO-3 and others leave it."""
    tensor = getattr(parameter, "ds_tensor", parameter).detach()
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


def steps_of(names: dict[str, Any]) -> list[dict[str, int]]:
    session = names["session"] if "session" in names else names["callback"].session
    return [{figure: getattr(record, figure) for figure in FIGURES} for record in session.records]


# ---- in place of the package ---------------------------------------------------------------------


class NoSession:
    def step(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    records = (types.SimpleNamespace(step=0, activation_peak_bytes=None),)
    last = records[-1]


def do_without() -> None:
    tba.attach = lambda *_, **__: contextlib.nullcontext(NoSession())
    integration = sys.modules.get("tba_offload.integrations.transformers")
    if integration is not None:
        from transformers import TrainerCallback

        class NoCallback(TrainerCallback):
            def __init__(self, *_: object) -> None:
                """Takes a policy and does nothing."""

        integration.OffloadCallback = NoCallback


if __name__ == "__main__":
    main()
