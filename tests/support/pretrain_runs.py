"""Runs of ``pretrain_tiny.py``, each in processes of its own on the loopback interface.

Processes of :func:`train` are forked, since importing takes far longer than training; those of :func:`run`
start anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from children import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warm import Warm

SCRIPT = Path(__file__).with_name("pretrain_tiny.py")
PATIENCE = 280.0
"""Seconds after which the processes of a run are killed and the test fails."""

STEPS = 4
TINY = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2"),
    *("--train-iters", str(STEPS), "--lr", "1e-3", "--log-interval", "1"),
    *("--eval-iters", "1", "--eval-interval", "2"),
)
"""The sizes of every run; evaluation has one iteration, of a global batch."""

ON_A_CPU = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--split", "90,5,5"),
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--use-cpu-initialization"),
    *("--num-workers", "0", "--no-persist-layer-norm", "--no-masked-softmax-fusion"),
    "--no-gradient-accumulation-fusion",
)
"""No data, no tokenizer, no GPU, no kernels of Apex or Transformer Engine."""

OWN = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""What every rank has in its environment."""

PLAIN = ("-m", "tba_lab.megatron_cpu_scripts")
OFFLOADING = ("-m", "tba_offload.megatron.launch", "--cpu")


def has_training() -> bool:
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


needs_training = pytest.mark.skipif(
    not has_training(),
    reason="needs megatron.training, which megatron-core carries from 0.19, for Python 3.12",
)

slow = pytest.mark.skipif(
    not has_training(), reason="slow: runs beside Megatron's training loop only, by run_megatron_training.sh"
)
"""Leaves a test of megatron-core to one of the two environments that have it."""


@dataclass(frozen=True)
class Figures:
    losses: list[tuple[str, int, str]]
    parameters: dict[str, str]

    def of(self, kind: str) -> list[tuple[int, str]]:
        return [(iteration, loss) for name, iteration, loss in self.losses if name == kind]


def figures(directory: Path) -> list[Figures]:
    found: list[Any] = [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]
    return [Figures([tuple(loss) for loss in each["losses"]], each["parameters"]) for each in found]


def train(
    python: Warm | None,
    how: Sequence[str],
    directory: Path,
    *flags: str,
    ranks: int = 1,
    batch: int = 4,
    says: str = "",
) -> list[Figures]:
    """A run that must succeed, forked or, without ``python``, started anew; its output has ``says``."""
    size = ("--global-batch-size", str(batch)) if batch else ()
    flags = (*TINY, *size, *ON_A_CPU, "--figures", str(directory), *flags)
    if python is None:
        status, output = run(how, *flags)
    else:
        status, output = fork(python, (*how, str(SCRIPT), *flags), ranks)
    assert status == 0, output[-5000:]
    assert says in output
    found = figures(directory)
    assert len(found) == ranks
    return found


def fork(python: Warm, command: Sequence[str], ranks: int) -> tuple[int, str]:
    """Runs ranks that are forked; the highest exit status without a sign, and what all of them wrote."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    own = [
        OWN | here | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks)
    ]
    ended = python.run_together([command] * ranks, own, timeout=PATIENCE)
    return max(abs(each.returncode) for each in ended), "\n".join(each.stdout + each.stderr for each in ended)


def run(how: Sequence[str], *flags: str) -> tuple[int, str]:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return finish([sys.executable, *how, str(SCRIPT), *flags], variables | here)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(command: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a command at the head of a process group of which nothing is left; return its status and output."""
    with tempfile.TemporaryFile("w+") as output:  # a pipe that nobody reads would hold it up
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment() | OWN | dict(variables),
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        output.seek(0)
        return abs(status), output.read()
