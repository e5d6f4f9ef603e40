"""``python -m tests.fuzz run START COUNT [--seconds S]``, ``one SEED``."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch

from .choices import Program, draw
from .comparing import Verdict, judge

HANGS = 300
"""Seconds after which a program is taken to hang; a traceback of all threads is printed then."""


def watched(program: Program) -> Verdict:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    try:
        return judge(program)
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(start: int, count: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for seed in range(start, start + count):
        if time.monotonic() > end:
            break
        print(f"\r{seed} ", end="", file=sys.stderr, flush=True)
        program = draw(seed)
        verdict = watched(program)
        counts[verdict.kind] += 1
        if verdict.is_fault:
            print(f"\n{program}\n  {verdict}", flush=True)
        elif verdict.kind in {"refused", "unsteady"}:
            refusals[f"{verdict.text.splitlines()[0][:160]} (such as {seed})"] += 1
    print(f"\n{dict(counts)}")
    for text, number in sorted(refusals.items()):
        print(f"  {number} {text}")
    return not counts.keys() & {"differs", "error", "other error", "left"}


def one(seed: int) -> bool:
    program = draw(seed)
    verdict = watched(program)
    print(f"{program}\n  {verdict}")
    return not verdict.is_fault


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    several = commands.add_parser("run", help="judge the programs of many seeds")
    several.add_argument("start", type=int)
    several.add_argument("count", type=int)
    several.add_argument("--seconds", type=float, default=float("inf"))
    commands.add_parser("one", help="judge the program of one seed").add_argument("seed", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    logging.getLogger("tba_offload").addHandler(logging.NullHandler())
    judge(draw(0))
    gc.collect()
    gc.freeze()  # what was imported: each program is collected several times
    if arguments.command == "run":
        return not run(arguments.start, arguments.count, arguments.seconds)
    return not one(arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
