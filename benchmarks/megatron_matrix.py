"""The real ``pretrain_gpt.py`` of a Megatron-LM checkout, with and without offloading, in many layouts.

    bash benchmarks/megatron_matrix.sh CHECKOUT

Each layout trains in processes of its own: untouched and without flags; with every layer placed keep; and
with offloading through each door, the launcher and the patch. All must print the same figures, and save the
same tensors (parameters, optimizer, random numbers), bit for bit. Without a GPU they train on the CPU, with
gloo.

With ``--resume`` each training ends after some iterations, and is resumed in another process: plain from
plain, with offloading from plain, and plain from a checkpoint of a run with offloading.

The checkout is copied, and stays as it is. Times are those that Megatron prints; since the ways do not
alternate, their ratio is rough.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tba_offload.errors import PatchError, RunLogError
from tba_offload.megatron.patch import Checkout
from tba_offload.report.log import read_run_log
from tba_offload.report.ranks import paths_of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tba_offload.report.log import RunLog

OFFLOAD_ALL = "budget:\n  in_flight_bytes: 512KiB\nmin_tensor_bytes: 1KiB\n"
MIXED = (
    OFFLOAD_ALL
    + """layers:
  - match: 0
    placement: keep
  - match: 2
    placement: recompute
"""
)
RECOMPUTE = f"default: recompute\n{OFFLOAD_ALL}"
OFFLOAD_REMAT = f"default: offload-remat\n{OFFLOAD_ALL}"
REBUILT = ("offloaded_bytes", "rebuilt_bytes")

SEQUENCE = 128
MODEL = f"""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --position-embedding-type learned_absolute --micro-batch-size 2
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer
    --vocab-size 127 --split 90,5,5 --eval-iters 1 --eval-interval 1000 --log-interval 1
    --save-interval 1000 --ckpt-format torch --transformer-impl local
    --num-workers 0 --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion
"""
LLAMA = """
    --normalization RMSNorm --swiglu --ffn-hidden-size 344 --disable-bias-linear --group-query-attention
    --num-query-groups 2 --position-embedding-type rope --no-rope-fusion
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
"""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
BALANCED = f"""
    {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
"""
WIDE = """
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256
"""
OVERLAPPING = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16"
RAMP_UP = (4, 4, 6)
"""Batch sizes of the first iterations, in the layout whose batches grow."""


@dataclass(frozen=True)
class Layout:
    """One way of training.

    Attributes:
        name: What it is called on the command line and in the table.
        flags: Megatron's flags beside :data:`MODEL`.
        ranks: Number of processes.
        policy: The policy of the runs with offloading.
        grows: Whether batches grow to their size.
        validations: Losses of evaluations that a run prints at least; at its end there is one for each split.
        proof: Figures of the run log that must not be zero: the policy took effect.
    """

    name: str
    flags: str = ""
    ranks: int = 1
    policy: str = OFFLOAD_ALL
    grows: bool = False
    validations: int = 2
    proof: tuple[str, ...] = ("offloaded_bytes", "read_bytes")

    def command_line(self, iterations: int, *, has_schedules: bool) -> list[str]:
        """Megatron's flags for some iterations.

        Args:
            iterations: How many.
            has_schedules: Whether batch sizes follow a schedule, as since 0.19, or ramp up, as before.
        """
        flags = f"{MODEL} {self.flags} {MACHINE}".split()
        if not self.grows:
            return [*flags, "--train-iters", str(iterations), "--global-batch-size", "8"]
        flags += ["--train-samples", str(sum(RAMP_UP) + 8 * (iterations - len(RAMP_UP)))]
        if has_schedules:  # by tokens: 4 sequences in a batch, 6 after 8 sequences, 8 after 14
            return [*flags, "--step-batch-size-schedule", f"0:4 {8 * SEQUENCE}:6 {14 * SEQUENCE}:8"]
        return [*flags, "--rampup-batch-size", "4", "2", "12", "--global-batch-size", "8"]


LAYOUTS = (
    Layout("base"),
    Layout("bf16", "--bf16"),
    Layout("llama-style", LLAMA),
    Layout("selective recompute", "--recompute-granularity selective"),
    Layout("mixed placements", policy=MIXED, proof=("offloaded_bytes", "recomputed_scopes")),
    Layout("recompute placement", policy=RECOMPUTE, proof=("recomputed_scopes",)),
    Layout("offload-remat placement", policy=OFFLOAD_REMAT, proof=REBUILT),
    Layout("offload-remat placement, llama-style", LLAMA, policy=OFFLOAD_REMAT, proof=REBUILT),
    Layout("experts", EXPERTS),
    Layout(
        "experts balanced by counts, recompute placement",
        BALANCED,
        policy=RECOMPUTE,
        proof=("recomputed_scopes",),
    ),
    Layout("batch-size ramp-up", grows=True),
    Layout("checkpoints, evaluation", "--save-interval 2 --eval-interval 2", validations=3),
    Layout("dp2, distributed optimizer, bf16", "--use-distributed-optimizer --bf16", ranks=2),
    Layout("tp2", "--tensor-model-parallel-size 2", ranks=2),
    Layout("tp2, sequence parallel", "--tensor-model-parallel-size 2 --sequence-parallel", ranks=2),
    Layout("pp2", "--pipeline-model-parallel-size 2", ranks=2),
    Layout(
        "pp2, interleaved",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        ranks=2,
    ),
    Layout("ep2, experts", f"{EXPERTS} --expert-model-parallel-size 2", ranks=2),
)

LARGE = (
    Layout(
        "large, dp2, distributed optimizer, bf16",
        f"{WIDE} {OVERLAPPING}",
        ranks=2,
        policy=MIXED,
        proof=("offloaded_bytes", "recomputed_scopes"),
    ),
    Layout(
        "large, dp2, distributed optimizer, bf16, recompute placement",
        f"{WIDE} {OVERLAPPING}",
        ranks=2,
        policy=RECOMPUTE,
        proof=("recomputed_scopes",),
    ),
)
"""Layouts that run by name only, since they take minutes: buffers of all parameters and of all gradients are
larger there than what is copied for a second run."""

ON_CPU = not torch.cuda.is_available()
MACHINE = (
    "--distributed-backend gloo --use-cpu-initialization"
    if ON_CPU
    else "--distributed-backend nccl --deterministic-mode"
)
"""Flags for what trains. On a GPU core_v0.19.0 leaves a model on the CPU that was initialized there."""

DETERMINISTIC = {} if ON_CPU else {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment that ``--deterministic-mode`` asks for."""

LOOPBACK = "127.0.0.1"
DOORS = ("launch", "patch")
RANK_ERRORS = "ranks"
"""Directory, relative to that of a run, in which torch's launcher puts the standard error of each rank."""
LAST_LINES = 40
"""Lines of a failed rank's output that are shown: a traceback through Megatron's training loop."""
CPU_SCRIPTS = "tba_lab.megatron_cpu_scripts" if ON_CPU else None
"""What runs a script without the launcher."""


class RunFailedError(Exception):
    """A run ended badly, or did not do what it should."""


@dataclass(frozen=True)
class Run:
    """What one training left behind.

    Attributes:
        iterations: For every iteration what Megatron printed about it, as text, without the time.
        milliseconds: For every iteration its time.
        validations: Losses of evaluations, as text.
        state: File and record of the checkpoints to the digest of a tensor's bytes.
        state_bytes: The size of these tensors.
        logs: The run log of each rank; none without flags.
    """

    iterations: list[dict[str, str]]
    milliseconds: list[float]
    validations: list[str]
    state: dict[str, str]
    state_bytes: int
    logs: list[RunLog]

    @property
    def losses(self) -> list[str]:
        """As Megatron prints them."""
        return [fields["lm loss"] for fields in self.iterations]

    @property
    def seconds(self) -> float:
        """Median time of the iterations after the first."""
        return statistics.median(self.milliseconds[1:]) / 1e3

    @property
    def logged_losses(self) -> list[str]:
        """The losses in the run logs, to the last bit."""
        return [step.loss.hex() for log in self.logs for step in log.steps if step.loss is not None]

    @property
    def peaks(self) -> list[int]:
        """Activation peak of each rank after the first step."""
        return [max(step.activation_peak_bytes or 0 for step in log.steps[1:]) for log in self.logs]

    def total(self, figure: str) -> int:
        """Sum of a figure of the run logs over steps and ranks."""
        return sum(getattr(step, figure) for log in self.logs for step in log.steps)


# Running

FIRST_PART = 3
"""Iterations before the end of the process, in trainings that are resumed."""


@dataclass(frozen=True)
class Part:
    """What one process does of a training that is resumed.

    Attributes:
        saved: Where its checkpoint goes.
        loaded: That of the part before; ``None`` in the first.
    """

    saved: Path
    loaded: Path | None = None

    @property
    def flags(self) -> list[str]:
        """Megatron's."""
        flags = ["--ckpt-format", "torch_dist"]
        if self.loaded is None:
            return [*flags, "--exit-interval", str(FIRST_PART)]
        return [*flags, "--load", str(self.loaded), "--auto-detect-ckpt-format"]


STATES = "\nstates:\n  sub_group_bytes: 64KiB\n"
"""Part of a policy: sub-groups so small that those of the tiny models do not all fit into the slots."""


Way = Callable[[Layout, Part], Run]
"""Trains a part."""


class Matrix:
    """Runs layouts of one checkout.

    Args:
        checkout: The checkout; it is not written to.
        place: Where everything temporary goes.
        iterations: Length of every training.
        timeout: Seconds after which a run has failed.
        states: Whether the states of optimizers are offloaded too.
    """

    def __init__(
        self, checkout: Path, place: Path, *, iterations: int, timeout: float, states: bool = False
    ) -> None:
        self._place, self._iterations, self._timeout = place, iterations, timeout
        self._states = states
        self._untouched = _copy(checkout, place / "untouched")
        self._patched = _copy(checkout, place / "patched")
        calculator = self._untouched / "megatron/core/num_microbatches_calculator.py"
        self._has_schedules = "step_batch_size_schedule" in calculator.read_text(encoding="utf-8")

    def patch(self) -> None:
        """Put the patch into one of the copies, as a user would."""
        command = [sys.executable, "-m", "tba_offload", "patch", str(self._patched)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunFailedError(f"tba-offload patch: {done.stderr.strip()}")

    def plain(self, layout: Layout, part: Part | None = None) -> Run:
        """Return the untouched script, without our flags."""
        return self._run(layout, self._untouched, CPU_SCRIPTS, part=part)

    def keep(self, layout: Layout) -> Run:
        """Nothing is offloaded, but a run log is written."""
        return self._launched(layout, ["--tba-placement", "keep"])

    def resumed(self, first: Way, second: Way, layout: Layout) -> Run:
        """Return a training in two processes.

        Args:
            first: How the first one trains.
            second: How the second one does.
            layout: The layout.

        Returns:
            What the second process printed and saved.
        """
        with tempfile.TemporaryDirectory(dir=self._place) as directory:
            half = Path(directory) / "half"
            first(layout, Part(half))
            return second(layout, Part(Path(directory) / "saved", half))

    def through(self, door: str, layout: Layout, part: Part | None = None) -> Run:
        """With offloading."""
        policy = self._place / "policy.yaml"
        policy.write_text(layout.policy + (STATES if self._states else ""))
        store = self._place / "store"
        store.mkdir(exist_ok=True)
        flags = ["--tba-policy", str(policy), "--tba-directory", str(store)]
        if door == "launch":
            run = self._launched(layout, flags, part)
        else:
            run = self._run(layout, self._patched, CPU_SCRIPTS, flags=flags, part=part)
        if any(store.iterdir()):
            raise RunFailedError(f"files were left in the store: {sorted(store.iterdir())}")
        for figure in layout.proof:
            if not run.total(figure):
                raise RunFailedError(f"{figure} is 0: the policy took no effect")
        if self._states and not all(map(_bytes_of_states, run.logs)):
            raise RunFailedError("no optimizer states were written")
        return run

    def _launched(self, layout: Layout, flags: Sequence[str], part: Part | None = None) -> Run:
        options, door = ["--cpu"] if ON_CPU else [], "tba_offload.megatron.launch"
        return self._run(layout, self._untouched, door, options, flags=flags, part=part)

    def _run(
        self,
        layout: Layout,
        checkout: Path,
        module: str | None,
        options: Sequence[str] = (),
        *,
        flags: Sequence[str] = (),
        part: Part | None = None,
    ) -> Run:
        """Trains: the checkout's script, run by a module or as it is."""
        with tempfile.TemporaryDirectory(dir=self._place) as directory:
            saved, log = Path(directory) / "saved", Path(directory) / "run.jsonl"
            saved = saved if part is None else part.saved
            command = [
                *_python(layout.ranks),
                *([] if module is None else ["-m", module]),
                *options,
                str(checkout / "pretrain_gpt.py"),
                *layout.command_line(self._iterations, has_schedules=self._has_schedules),
                *("--save", str(saved)),
                *([] if part is None else part.flags),
                *flags,
                *(["--tba-run-log", str(log)] if flags else []),
            ]
            output = _output_of(command, cwd=Path(directory), timeout=self._timeout)
            logs = [read_run_log(path) for path in paths_of_ranks(log)] if flags else []
            state, size = _state_in(saved)
        run = Run(*_iterations_in(output), _VALIDATION.findall(output), state, size, logs)
        self._check_complete(run, layout, part)
        return run

    def _check_complete(self, run: Run, layout: Layout, part: Part | None) -> None:
        wanted, validations = self._iterations, layout.validations
        if part is not None and part.loaded is None:  # evaluations come at the end of a training
            wanted, validations = FIRST_PART, 0
        elif part is not None:
            wanted, validations = wanted - FIRST_PART, 2
        if len(run.iterations) != wanted:
            raise RunFailedError(f"printed {len(run.iterations)} iterations instead of {wanted}")
        if len(run.validations) < validations:
            raise RunFailedError(f"printed {len(run.validations)} losses of evaluations, too few")
        if not run.state:
            raise RunFailedError("saved no checkpoint")
        if run.logs and [len(log.steps) for log in run.logs] != [wanted] * layout.ranks:
            raise RunFailedError(f"the run logs have not {wanted} steps for each of {layout.ranks} ranks")


def _copy(checkout: Path, target: Path) -> Path:
    """Return what training needs: the package, and the scripts at the root."""
    shutil.copytree(checkout / "megatron", target / "megatron")
    for script in checkout.glob("*.py"):
        shutil.copy2(script, target)
    return target


def _python(ranks: int) -> list[str]:
    """Return what runs a script or a module in some processes."""
    if ranks == 1:  # by environment variables, since torch's launcher takes seconds
        return [sys.executable]
    options = ["--nproc-per-node", str(ranks), "--master-addr", LOOPBACK, "--master-port", str(_free_port())]
    apart = [
        "--log-dir",
        RANK_ERRORS,
        "--redirects",
        "2",
    ]  # or ranks would write into each other's tracebacks
    return [sys.executable, "-m", "torch.distributed.run", *options, *apart]


def _environment() -> dict[str, str]:
    """For one process; torch's launcher overwrites it in those that it starts."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return os.environ | DETERMINISTIC | alone | {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _output_of(command: Sequence[str], *, cwd: Path, timeout: float) -> str:
    """Return what a command prints; when it has ended, none of its processes is left."""
    output, errors = cwd / "output.txt", cwd / "errors.txt"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(command, cwd=cwd, env=_environment(), stdout=out, stderr=err)
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_with_descendants(process)
    text = output.read_text(errors="replace")
    if status != 0:
        how = f"no end after {timeout:g} s" if status is None else f"exit status {status}"
        raise RunFailedError("\n".join([how, *_cause(text, errors.read_text(errors="replace"), cwd)]))
    return text


def _cause(output: str, errors: str, directory: Path) -> list[str]:
    """Return the last lines of what failed.

    Args:
        output: What the command printed.
        errors: What it printed to the standard error: of torch's launcher only its own summary, which has no
            traceback of a rank but names the one that failed first.
        directory: Where the ranks were started; the standard error of each is below it.
    """
    ranks = {
        int(file.parent.name): file.read_text(errors="replace").splitlines()
        for file in directory.glob(f"{RANK_ERRORS}/*/attempt_0/*/stderr.log")
    }
    if not ranks:
        return (output + errors).splitlines()[-LAST_LINES:]
    first = _FIRST_FAILURE.search(errors)
    failed = [int(first[1])] if first is not None else sorted(ranks)
    return [line for rank in failed for line in (f"rank {rank}:", *ranks.get(rank, [])[-LAST_LINES:])]


def _kill_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """Walk the tree of processes: the workers of torch's launcher are in groups of their own."""
    if process.poll() is not None:
        return
    for pid in [*_descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> Iterator[int]:
    for child in [child for child, parent in _parents().items() if parent == pid]:
        yield child
        yield from _descendants(child)


def _parents() -> dict[int, int]:
    """Every process, and its parent."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has ended
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return parents


# Reading

_ITERATION = re.compile(r"\] iteration +\d+/ +\d+ \|(.*)\|")
_FIRST_FAILURE = re.compile(r"Root Cause.*?\brank +: (\d+)", re.DOTALL)
_VALIDATION = re.compile(r"validation loss at (.*?) *\|? *\n")
_TIME = "elapsed time per iteration (ms)"


def _iterations_in(output: str) -> tuple[list[dict[str, str]], list[float]]:
    """Return what is printed about every iteration, and its time."""
    iterations, times = [], []
    for line in _ITERATION.findall(output):
        # Another rank may print into the same line.
        fields = dict(field.strip().split(":", 1) for field in line.split("|") if ":" in field)
        times.append(float(fields.pop(_TIME)))
        iterations.append({name: value.strip() for name, value in fields.items()})
    return iterations, times


def _state_in(saved: Path) -> tuple[dict[str, str], int]:
    """Digests of all tensors in the checkpoints, and their size.

    Checkpoints are zip files with a record for the bytes of each tensor. What else is in them, such as the
    command line, may differ.
    """
    digests, size = {}, 0
    for metadata in sorted(saved.rglob(".metadata")):
        for name, tensor in _distributed_tensors(metadata.parent):
            digests[f"{metadata.parent.name}: {name}"] = hashlib.sha256(_bytes_of(tensor)).hexdigest()
            size += tensor.nbytes
    for file in sorted(saved.rglob("*.pt")):
        with zipfile.ZipFile(file) as records:
            for record in records.infolist():
                if "/data/" in record.filename:
                    name = f"{file.relative_to(saved)}: {record.filename}"
                    digests[name] = hashlib.sha256(records.read(record)).hexdigest()
                    size += record.file_size
    return digests, size


def _distributed_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint in the distributed format, by name and place.

    In which order they lie in the files of the ranks may differ.
    """
    metadata = FileSystemReader(checkpoint).read_metadata()
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (checkpoint / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            yield f"{index.fqn} {index.offset}", torch.load(data, weights_only=True)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# Comparing


def differences(run: Run, plain: Run) -> list[str]:
    """Return what one run printed or saved otherwise than the run without offloading."""
    found = []
    for number, (ours, theirs) in enumerate(zip(run.iterations, plain.iterations, strict=True), 1):
        found += [
            f"iteration {number}: {name} {ours.get(name)} instead of {theirs.get(name)}"
            for name in {**theirs, **ours}
            if ours.get(name) != theirs.get(name)
        ]
    if run.validations != plain.validations:
        found.append(f"validation losses {run.validations} instead of {plain.validations}")
    if run.state != plain.state:
        names = [
            name for name in {**plain.state, **run.state} if run.state.get(name) != plain.state.get(name)
        ]
        found.append(f"{len(names)} of {len(plain.state)} saved tensors differ, the first in {names[0]}")
    return found


def differences_of(runs: dict[str, Run]) -> dict[str, list[str]]:
    """For each way what differs from the run without flags."""
    found = {way: differences(run, runs["plain"]) for way, run in runs.items()}
    for way, run in runs.items():
        if run.logs and "keep" in runs and run.logged_losses != runs["keep"].logged_losses:
            found[way].append("the losses in the run logs differ from those with keep in their last bits")
    return {way: each for way, each in found.items() if each}


# Showing

HEADS = (
    "layout",
    "ranks",
    "same bits with offloading",
    "step, x plain (rough)",
    "activation peak of each rank, all kept, MiB",
    "offloading, MiB",
    "offloaded in all, MiB",
)
LOSS_HEADS = ("layout", "way", "losses as Megatron prints them")


def cells(layout: Layout, runs: dict[str, Run]) -> list[str]:
    """Return a row of the table of figures; where the doors differ, a value for each."""
    plain, others = runs["plain"], [run for way, run in runs.items() if way not in ("plain", "keep")]
    doors = [run for run in others if run.logs]
    different = differences_of(runs)
    compared = f"{_many(len(plain.validations), 'evaluation')}, {_mib(plain.state_bytes)} MiB saved"
    peaks = [max(each) for each in zip(*(run.peaks for run in doors), strict=True)]
    return [
        layout.name,
        str(layout.ranks),
        f"NO: {', '.join(different)}" if different else f"yes: {len(plain.losses)} iterations, {compared}",
        " / ".join(f"{run.seconds / plain.seconds:.2f}" for run in doors),
        ", ".join(_mib(peak) for peak in runs["keep"].peaks) if "keep" in runs else "",
        ", ".join(_mib(peak) for peak in peaks),
        " / ".join(_mib(run.total("offloaded_bytes")) for run in doors),
    ]


def loss_cells(layout: Layout, runs: dict[str, Run]) -> list[list[str]]:
    """Rows of the table of losses: ways with equal losses share one."""
    rows: dict[str, list[str]] = {}
    for way, run in runs.items():
        rows.setdefault(" ".join(run.losses), []).append(way)
    return [[layout.name, " = ".join(ways), losses] for losses, ways in rows.items()]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def show(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(show_lines=True)
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=110)).print(table)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the same table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ways_of(matrix: Matrix, doors: Sequence[str], *, resume: bool) -> dict[str, Callable[[Layout], Run]]:
    """How a layout is trained; the first way is what the others are compared with."""
    offloading = {door: functools.partial(matrix.through, door) for door in doors}
    if not resume:
        return {"plain": matrix.plain, "keep": matrix.keep, **offloading}
    ways = {"plain": functools.partial(matrix.resumed, matrix.plain, matrix.plain)}
    for door, way in offloading.items():
        ways[f"plain, then {door}"] = functools.partial(matrix.resumed, matrix.plain, way)
        ways[f"{door}, then plain"] = functools.partial(matrix.resumed, way, matrix.plain)
    return ways


def run_layout(matrix: Matrix, layout: Layout, doors: Sequence[str], *, resume: bool) -> dict[str, Run] | str:
    """All runs of one layout, or what went wrong."""
    ways = ways_of(matrix, doors, resume=resume)
    runs = {}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(layout.name, total=len(ways))
        for way, train in ways.items():
            try:
                runs[way] = train(layout)
            except (RunFailedError, RunLogError) as error:
                console.print(f"{layout.name}: {way} failed")
                return f"{layout.name}, {way}: {error}"
            progress.advance(task)
        different = ", ".join(differences_of(runs))
        console.print(f"{layout.name}: {f'{different} DIFFER' if different else 'the same bits'}")
    return runs


def _bytes_of_states(log: RunLog) -> int:
    events = [event for event in log.others if event["event"] == "states"]
    return sum(int(str(event["written_bytes"])) for event in events)


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--layout",
    "names",
    multiple=True,
    type=click.Choice([layout.name for layout in (*LAYOUTS, *LARGE)]),
    help="Only this layout; may be repeated.  [default: all but the large ones]",
)
@click.option("--iterations", type=click.IntRange(min=FIRST_PART + 1), default=5, show_default=True)
@click.option("--door", type=click.Choice([*DOORS, "both"]), default="both", show_default=True)
@click.option("--states", is_flag=True, help="Offload the states of the optimizer too.")
@click.option(
    "--flags", default="", help="More flags of Megatron's for each layout, as --use-distributed-optimizer."
)
@click.option("--resume", is_flag=True, help="Resume trainings in another process, in the other mode.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for each run.")
@click.option(
    "--markdown", "markdown_file", type=click.Path(path_type=Path), help="Also write the tables here."
)
def main(
    *,
    checkout: Path,
    names: Sequence[str],
    iterations: int,
    door: str,
    states: bool,
    flags: str,
    resume: bool,
    timeout: float,
    markdown_file: Path | None,
) -> None:
    """Train with CHECKOUT in every layout, with and without offloading, and compare."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: nothing is left
    if not (checkout / "pretrain_gpt.py").is_file():
        raise click.BadParameter(f"{checkout} has no pretrain_gpt.py", param_hint="CHECKOUT")
    doors = DOORS if door == "both" else (door,)
    wanted = [layout for layout in (*LAYOUTS, *LARGE) if layout.name in names] or list(LAYOUTS)
    wanted = [replace(layout, flags=f"{layout.flags} {flags}") for layout in wanted]
    with tempfile.TemporaryDirectory(prefix="tba-matrix-") as place:
        matrix = Matrix(checkout, Path(place), iterations=iterations, timeout=timeout, states=states)
        try:
            if "patch" in doors:
                matrix.patch()
        except RunFailedError as error:
            raise click.ClickException(str(error)) from None
        results = [(layout, run_layout(matrix, layout, doors, resume=resume)) for layout in wanted]
    sys.exit(report(_release(checkout), results, markdown_file))


def _release(checkout: Path) -> str:
    try:
        return Checkout.at(checkout).release
    except PatchError:
        return checkout.name


def report(
    release: str, results: Sequence[tuple[Layout, dict[str, Run] | str]], markdown_file: Path | None
) -> int:
    """Print everything, and return the exit status."""
    good = [(layout, runs) for layout, runs in results if isinstance(runs, dict)]
    rows = [cells(layout, runs) for layout, runs in good]
    losses = [row for layout, runs in good for row in loss_cells(layout, runs)]
    show(HEADS, rows)
    show(LOSS_HEADS, losses)
    problems = [failure for _, failure in results if isinstance(failure, str)]
    for layout, runs in good:
        for way, found in differences_of(runs).items():
            problems += [f"{layout.name}, {way}: {what}" for what in found]
    for problem in problems:
        click.echo(problem, err=True)
    if markdown_file is not None:
        text = f"### {release}\n\n{markdown(HEADS, rows)}\n{markdown(LOSS_HEADS, losses)}"
        markdown_file.write_text(text + "".join(f"\n{problem}\n" for problem in problems))
    click.echo(f"{release}: {_many(len(results), 'layout')}, {_many(len(problems), 'problem')}")
    return 1 if problems else 0


if __name__ == "__main__":
    main()
