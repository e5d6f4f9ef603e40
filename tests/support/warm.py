"""Processes that begin with what takes longest to import: one has imported it, and forks for each program.

    python warm.py MODULE...

Each line of standard input describes a program as JSON; the answer is the exit status of the process that ran
it. That process ends as any interpreter does: with its threads joined and its exit functions called.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Warm:
    """Runs programs in processes that have modules imported, one after the other.

    Args:
        process: The process that forks.
        folder: Where what programs print is kept until it is read, and what that process complains of.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._complaints = folder / "complaints"

    def run(
        self, *arguments: str, timeout: float = 600, is_strict: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` of the interpreter with these arguments returns.

        Args:
            arguments: ``-c`` and code, ``-m`` and a module, or a path; then those of the program.
            timeout: Seconds, after which it is killed, and the test fails. Products in bf16 take a hundred
                times as long on CPUs without instructions for it.
            is_strict: Whether warnings are errors, as with ``-W error``.
        """
        output, errors = self._folder / "output", self._folder / "errors"
        job = {"arguments": arguments, "output": str(output), "errors": str(errors), "is_strict": is_strict}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(job)}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout, output.read_text(), errors.read_text())
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(self._complaints.read_text())
        status = json.loads(answer)
        return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())


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
        child = os.fork()
        if child == 0:
            os.close(answers)
            job: dict[str, Any] = json.loads(line)
            return job
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{status}\n".encode())
    return None


def become(job: dict[str, Any]) -> None:
    """Runs a program as the interpreter does whose command line has these arguments."""
    for fd, path in ((0, os.devnull), (1, job["output"]), (2, job["errors"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, fd)
        os.close(file)
    # Or libraries that count at the end (nanobind, with Triton) tell as leaked what is never collected.
    atexit.register(gc.unfreeze)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if job["is_strict"]:
        warnings.simplefilter("error")
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
