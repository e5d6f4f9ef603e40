"""Processes that begin with what takes longest to import: one has imported it, and forks for each program.

    python warm.py MODULE...

Each line of standard input describes programs that run at once, as JSON; the answer is the exit statuses of
the processes that ran them. These end as any interpreter does: with their threads joined and their exit
functions called.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GRACE = 30.0
"""Seconds in which the others of programs that run at once may end after one has failed."""


class Warm:
    """Runs programs in processes that have modules imported."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._complaints = folder / "complaints"

    def run(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` of the interpreter with these arguments returns.

        Args:
            arguments: ``-c`` and code, ``-m`` and a module, or a path; then those of the program.
            timeout: Seconds, after which it is killed, and the test fails. Products in bf16 take a hundred
                times as long on CPUs without instructions for it.
        """
        (finished,) = self.run_together([arguments], [{}], timeout=timeout)
        return finished

    def run_together(
        self, programs: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]], *, timeout: float
    ) -> list[subprocess.CompletedProcess[str]]:
        """As :meth:`run`, for programs that run at once; the others end soon where one fails."""
        places = [(self._folder / f"output{n}", self._folder / f"errors{n}") for n in range(len(programs))]
        jobs = [
            {"arguments": arguments, "environment": own, "output": str(output), "errors": str(errors)}
            for arguments, own, (output, errors) in zip(programs, variables, places, strict=True)
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(jobs)}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            said = "\n".join(path.read_text() for place in places for path in place)
            raise subprocess.TimeoutExpired(str(programs), timeout, said)
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(self._complaints.read_text())
        return [
            subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())
            for arguments, status, (output, errors) in zip(programs, json.loads(answer), places, strict=True)
        ]


@contextlib.contextmanager
def warm(*modules: str, env: Mapping[str, str]) -> Iterator[Warm]:
    """A process with these modules; whatever happens, no process is left."""
    with (
        TemporaryDirectory() as folder,
        (Path(folder) / "complaints").open("w") as complaints,
        subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=env,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Warm(process, Path(folder))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# What follows runs in the process that forks, and in those that it forks.


def serve(modules: list[str]) -> dict[str, Any] | None:
    """Forks for each program; in the child this returns the program, otherwise nothing."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each collection in a child would copy all pages
    answers = os.dup(1)
    for line in sys.stdin:
        jobs: list[dict[str, Any]] = json.loads(line)
        children = []
        for job in jobs:
            child = os.fork()
            if child == 0:
                os.close(answers)
                return job
            children.append(child)
        os.write(answers, f"{json.dumps(wait_for(children))}\n".encode())
    return None


def wait_for(children: list[int]) -> list[int]:
    """Waits for all, and kills those that have not ended a while after another one failed."""
    statuses: dict[int, int] = {}
    deadline = math.inf
    while len(statuses) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            statuses[child] = os.waitstatus_to_exitcode(status)
            if statuses[child] != 0:
                deadline = min(deadline, time.monotonic() + GRACE)
        elif time.monotonic() > deadline:
            for other in set(children) - statuses.keys():
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return [statuses[child] for child in children]


def become(job: dict[str, Any]) -> None:
    """Runs a program as the interpreter does whose command line has these arguments."""
    for fd, path in ((0, os.devnull), (1, job["output"]), (2, job["errors"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, fd)
        os.close(file)
    os.environ |= job["environment"]
    # Or libraries that count at the end (nanobind, with Triton) tell as leaked what is never collected.
    atexit.register(gc.unfreeze)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, *rest = job["arguments"]
    if kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(kind).parent)
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__" and (found := serve(sys.argv[1:])) is not None:
    become(found)
