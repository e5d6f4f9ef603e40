"""Run ``pretrain_gpt.py`` of a Megatron-LM checkout in many parallel layouts, with and without offloading.

    bash benchmarks/megatron_matrix.sh CHECKOUT

For each layout, the script trains without tba-offload (``plain``), with the placement keep, with offloading
through the launcher, and with offloading through the patch. All trainings must print the same figures, and
save the same tensors (parameters, optimizer states, random states), bit for bit. Without a GPU, training runs
on the CPU with gloo.

With ``--resume``, each training stops after some iterations and is resumed in another process: plain after
plain, offloading after plain, and plain after offloading.

The script works on a copy of the checkout. Times are the times that Megatron prints. The trainings do not
alternate, so ratios of times are rough. The ratio of ``keep`` to ``plain`` shows how rough.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

import click
import torch
from lanes import show
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tba_offload.errors import PatchError, RunLogError
from tba_offload.megatron.patch import Checkout
from tba_offload.report.log import RunLog, read_run_log
from tba_offload.report.ranks import paths_of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Layouts

OFFLOAD_ALL = "budget:\n  in_flight_bytes: 512KiB\nmin_tensor_bytes: 1KiB\n"
MIXED = f"{OFFLOAD_ALL}layers:\n- match: 0\n  placement: keep\n- match: 2\n  placement: recompute\n"
RECOMPUTE = f"default: recompute\n{OFFLOAD_ALL}"
OFFLOAD_REMAT = f"default: offload-remat\n{OFFLOAD_ALL}"
STATES = "\nstates:\n  sub_group_bytes: 64KiB\n"
"""Part of a policy: small sub-groups, so that tiny models have more sub-groups than slots."""

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
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
RAMP_UP = (4, 4, 6)
"""Batch sizes of the first iterations in the layout with growing batches."""

WRITTEN, RECOMPUTED = ("offloaded_bytes", "read_bytes"), ("recomputed_scopes",)
REBUILT, BOTH = ("offloaded_bytes", "rebuilt_bytes"), ("offloaded_bytes", "recomputed_scopes")


@dataclass(frozen=True)
class Layout:
    """Flags of Megatron in addition to :data:`MODEL`, and the policy of the runs with offloading.

    ``proof`` names figures of the run log that must not be zero, to prove that the policy took effect.
    """

    name: str
    flags: str = ""
    ranks: int = 1
    policy: str = OFFLOAD_ALL
    proof: tuple[str, ...] = WRITTEN
    grows: bool = False
    validations: int = 2

    def command_line(self, iterations: int, *, has_schedules: bool) -> list[str]:
        """Return Megatron's flags. Growing batch sizes need other flags since Megatron 0.19."""
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
    Layout("mixed placements", policy=MIXED, proof=BOTH),
    Layout("recompute placement", policy=RECOMPUTE, proof=RECOMPUTED),
    Layout("offload-remat placement", policy=OFFLOAD_REMAT, proof=REBUILT),
    Layout("offload-remat placement, llama-style", LLAMA, policy=OFFLOAD_REMAT, proof=REBUILT),
    Layout("experts", EXPERTS),
    Layout("experts balanced by counts, recompute placement", BALANCED, policy=RECOMPUTE, proof=RECOMPUTED),
    Layout("batch-size ramp-up", grows=True),
    Layout("checkpoints, evaluation", "--save-interval 2 --eval-interval 2", validations=3),
    Layout("dp2, distributed optimizer, bf16", "--use-distributed-optimizer --bf16", 2),
    Layout("tp2", TP2, 2),
    Layout("tp2, sequence parallel", f"{TP2} --sequence-parallel", 2),
    Layout("pp2", PP2, 2),
    Layout("pp2, interleaved", f"{PP2} --num-layers-per-virtual-pipeline-stage 1", 2),
    Layout("ep2, experts", f"{EXPERTS} --expert-model-parallel-size 2", 2),
)
ON_CPU = not torch.cuda.is_available()
MACHINE = "--distributed-backend nccl --deterministic-mode"
DETERMINISTIC = {} if ON_CPU else {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
if ON_CPU:  # on a GPU core_v0.19.0 leaves a model on the CPU that was initialized there
    MACHINE = "--distributed-backend gloo --use-cpu-initialization"
PLAIN = "tba_lab.megatron_cpu_scripts" if ON_CPU else None
"""Module that runs a script without the launcher on a CPU."""

LOOPBACK, DOORS = "127.0.0.1", ("launch", "patch")
FIRST_PART = 3
"""Number of iterations before a training that is resumed stops."""


class RunFailedError(Exception):
    """A run failed, or its policy took no effect."""


@dataclass(frozen=True)
class Run:
    """Output of one training: printed figures, digests of saved tensors, and one run log per rank."""

    iterations: list[dict[str, str]]
    milliseconds: list[float]
    validations: list[str]
    state: dict[str, str]
    state_bytes: int
    logs: list[RunLog]

    @property
    def seconds(self) -> float:
        """Median time of the iterations after the first."""
        return statistics.median(self.milliseconds[1:]) / 1e3

    @property
    def logged_losses(self) -> list[str]:
        """Losses in the run logs, with all bits."""
        return [step.loss.hex() for log in self.logs for step in log.steps if step.loss is not None]

    @property
    def peaks(self) -> list[int]:
        """Activation peak of each rank, without the first step."""
        return [max(step.activation_peak_bytes or 0 for step in log.steps[1:]) for log in self.logs]

    def total(self, figure: str) -> int:
        """Return the sum of a figure of the run logs over steps and ranks."""
        return sum(getattr(step, figure) for log in self.logs for step in log.steps)


@dataclass(frozen=True)
class Part:
    """Directories of the checkpoints that one process of a resumed training saves and loads."""

    saved: Path
    loaded: Path | None = None

    @property
    def flags(self) -> list[str]:
        """Flags of Megatron for these directories."""
        if self.loaded is None:
            return ["--ckpt-format", "torch_dist", "--exit-interval", str(FIRST_PART)]
        return ["--ckpt-format", "torch_dist", "--load", str(self.loaded), "--auto-detect-ckpt-format"]


Way = Callable[..., Run]
"""Function that trains a layout, or a part of its iterations."""


class Matrix:
    """Trainings with copies of one checkout. All files are written to ``place``."""

    def __init__(
        self, checkout: Path, place: Path, *, iterations: int, timeout: float, states: bool = False
    ) -> None:
        self._place, self._iterations, self._timeout, self._states = place, iterations, timeout, states
        self._untouched, self._patched = place / "untouched", place / "patched"
        for target in (self._untouched, self._patched):
            shutil.copytree(checkout / "megatron", target / "megatron")
            for script in checkout.glob("*.py"):
                shutil.copy2(script, target)
        calculator = self._untouched / "megatron/core/num_microbatches_calculator.py"
        self._has_schedules = "step_batch_size_schedule" in calculator.read_text(encoding="utf-8")

    def patch(self) -> None:
        """Patch one of the copies with ``tba-offload patch``."""
        command = [sys.executable, "-m", "tba_offload", "patch", str(self._patched)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunFailedError(f"tba-offload patch: {done.stderr.strip()}")

    def ways(self, doors: Sequence[str], *, resume: bool) -> dict[str, Way]:
        """Return the ways to train a layout. The other ways are compared with the first way."""
        offloading = {door: functools.partial(self.through, door) for door in doors}
        if not resume:
            keep = functools.partial(self._launched, flags=["--tba-placement", "keep"])
            return {"plain": self.plain, "keep": keep, **offloading}
        ways = {"plain": functools.partial(self.resumed, self.plain, self.plain)}
        for door, way in offloading.items():
            ways[f"plain, then {door}"] = functools.partial(self.resumed, self.plain, way)
            ways[f"{door}, then plain"] = functools.partial(self.resumed, way, self.plain)
        return ways

    def plain(self, layout: Layout, part: Part | None = None) -> Run:
        """Train without tba-offload."""
        return self._run(layout, self._untouched, [PLAIN] if PLAIN else [], part=part)

    def resumed(self, first: Way, second: Way, layout: Layout) -> Run:
        """Train in two processes. Return the output of the second process."""
        with tempfile.TemporaryDirectory(dir=self._place) as directory:
            half = Path(directory) / "half"
            first(layout, Part(half))
            return second(layout, Part(Path(directory) / "saved", half))

    def through(self, door: str, layout: Layout, part: Part | None = None) -> Run:
        """Train with offloading, through the launcher or the patch."""
        policy, store = self._place / "policy.yaml", self._place / "store"
        policy.write_text(layout.policy + (STATES if self._states else ""))
        store.mkdir(exist_ok=True)
        flags = ["--tba-policy", str(policy), "--tba-directory", str(store)]
        if door == "launch":
            run = self._launched(layout, part, flags)
        else:
            run = self._run(layout, self._patched, [PLAIN] if PLAIN else [], flags, part)
        if any(store.iterdir()):
            raise RunFailedError(f"files were left in the store: {sorted(store.iterdir())}")
        for figure in layout.proof:
            if not run.total(figure):
                raise RunFailedError(f"{figure} is 0: the policy took no effect")
        events = [[each for each in log.others if each["event"] == "states"] for log in run.logs]
        if self._states and not all(any(each["written_bytes"] for each in found) for found in events):
            raise RunFailedError("no optimizer states were written")
        return run

    def _launched(self, layout: Layout, part: Part | None = None, flags: Sequence[str] = ()) -> Run:
        door = ["tba_offload.megatron.launch", *(["--cpu"] if ON_CPU else [])]
        return self._run(layout, self._untouched, door, flags, part)

    def _run(
        self,
        layout: Layout,
        checkout: Path,
        module: Sequence[str],
        flags: Sequence[str] = (),
        part: Part | None = None,
    ) -> Run:
        with tempfile.TemporaryDirectory(dir=self._place) as directory:
            saved, log = Path(directory) / "saved", Path(directory) / "run.jsonl"
            saved = saved if part is None else part.saved
            command = [
                *python_of(layout.ranks),
                *(["-m", *module] if module else []),
                str(checkout / "pretrain_gpt.py"),
                *layout.command_line(self._iterations, has_schedules=self._has_schedules),
                *("--save", str(saved)),
                *([] if part is None else part.flags),
                *flags,
                *(["--tba-run-log", str(log)] if flags else []),
            ]
            output = output_of(command, Path(directory), self._timeout)
            logs = [read_run_log(path) for path in paths_of_ranks(log)] if flags else []
            run = Run(*iterations_in(output), VALIDATION.findall(output), *state_in(saved), logs)
        self._check_complete(run, layout, part)
        return run

    def _check_complete(self, run: Run, layout: Layout, part: Part | None) -> None:
        wanted, validations = self._iterations, layout.validations
        if part is not None:  # evaluations come at the end of a training
            is_first = part.loaded is None
            wanted, validations = (FIRST_PART, 0) if is_first else (wanted - FIRST_PART, 2)
        if len(run.iterations) != wanted or len(run.validations) < validations or not run.state:
            raise RunFailedError(
                f"printed {len(run.iterations)} iterations instead of {wanted} and {len(run.validations)} "
                f"losses of evaluations, and saved {len(run.state)} tensors"
            )
        if run.logs and [len(log.steps) for log in run.logs] != [wanted] * layout.ranks:
            raise RunFailedError(f"not all run logs of the {layout.ranks} ranks have {wanted} steps")


# Processes


def python_of(ranks: int) -> list[str]:
    """Return the command that runs a script or module in some processes. Each rank has a file for errors."""
    if ranks == 1:  # with environment variables, because torch's launcher takes seconds
        return [sys.executable]
    options = ["--nproc-per-node", str(ranks), "--master-addr", LOOPBACK, "--master-port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", *options, "--log-dir", "ranks", "--redirects", "2"]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def output_of(command: Sequence[str], cwd: Path, timeout: float) -> str:
    """Return the output of a command. All processes of the command are ended."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment = os.environ | DETERMINISTIC | alone
    environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    output, errors = cwd / "output.txt", cwd / "errors.txt"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err)
        try:
            how = f"exit status {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            how = f"no end after {timeout:g} s"
        finally:
            if process.poll() is None:
                for pid in [*descendants(process.pid), process.pid]:
                    os.kill(pid, signal.SIGKILL)
                process.wait()
    text = output.read_text(errors="replace")
    if how == "exit status 0":
        return text
    ranks = sorted(cwd.glob("ranks/*/attempt_0/*/stderr.log")) or [errors]
    tails = (line for file in ranks for line in file.read_text(errors="replace").splitlines()[-40:])
    raise RunFailedError("\n".join([how, *text.splitlines()[-20:], *tails]))


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all child processes. The workers of torch's launcher have their own process groups."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield from descendants(child)
            yield child


# Results

ITERATION = re.compile(r"\] iteration +\d+/ +\d+ \|(.*)\|")
VALIDATION = re.compile(r"validation loss at (.*?)(?: *\|? *| \| WARNING:.*)\n")  # of another rank


def iterations_in(output: str) -> tuple[list[dict[str, str]], list[float]]:
    """Return the printed figures and the time of each iteration."""
    iterations, times = [], []
    for line in ITERATION.findall(output):
        own = line.partition("[Rank")[0]  # another rank may print how much memory it has into the same line
        fields = dict(field.strip().split(":", 1) for field in own.split("|") if ":" in field)
        times.append(float(fields.pop("elapsed time per iteration (ms)")))
        iterations.append({name: value.strip() for name, value in fields.items()})
    return iterations, times


def state_in(saved: Path) -> tuple[dict[str, str], int]:
    """Return digests of all tensors in the checkpoints, and the number of bytes of these tensors."""
    tensors: dict[str, bytes] = {}
    for path in saved.rglob(".metadata"):
        tensors |= {f"{path.parent.name}: {name}": data for name, data in shards(path)}
    for file in saved.rglob("*.pt"):
        with zipfile.ZipFile(file) as records:
            for record in records.infolist():
                if "/data/" in record.filename:
                    tensors[f"{file.relative_to(saved)}: {record.filename}"] = records.read(record)
    digests = {name: hashlib.sha256(tensors[name]).hexdigest() for name in sorted(tensors)}
    return digests, sum(map(len, tensors.values()))


def shards(metadata_file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the tensors of a distributed checkpoint. Their order in the files may differ between runs."""
    metadata = FileSystemReader(metadata_file.parent).read_metadata()
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (metadata_file.parent / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                tensor = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
            yield (
                f"{index.fqn} {index.offset}",
                tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            )


def differences(run: Run, plain: Run) -> list[str]:
    """Return the differences between the outputs of a run and the run without offloading."""
    found = [
        f"iteration {number}: {name} {ours.get(name)} instead of {theirs.get(name)}"
        for number, (ours, theirs) in enumerate(zip(run.iterations, plain.iterations, strict=True), 1)
        for name in {**theirs, **ours}
        if ours.get(name) != theirs.get(name)
    ]
    if run.validations != plain.validations:
        found.append(f"validation losses {run.validations} instead of {plain.validations}")
    names = [name for name in {**plain.state, **run.state} if run.state.get(name) != plain.state.get(name)]
    if names:
        found.append(f"{len(names)} of {len(plain.state)} saved tensors differ, the first in {names[0]}")
    return found


def differences_of(runs: dict[str, Run]) -> dict[str, list[str]]:
    """Return the differences of each way from the run without offloading."""
    found = {way: differences(run, runs["plain"]) for way, run in runs.items()}
    for way, run in runs.items():
        if run.logs and "keep" in runs and run.logged_losses != runs["keep"].logged_losses:
            found[way].append("the losses in the run logs differ from those with keep in their last bits")
    return {way: each for way, each in found.items() if each}


HEADS = ("layout", "ranks", "same bits with offloading", "step of each way, x plain (rough)")
HEADS += ("activation peak of each rank, all kept, MiB", "offloading, MiB", "offloaded in all, MiB")


def cells(layout: Layout, runs: dict[str, Run]) -> list[str]:
    """Return a row of the table, with values for the launcher and the patch."""
    plain, logged = runs["plain"], {way: run for way, run in runs.items() if run.logs}
    doors = [run for way, run in logged.items() if way != "keep"]
    different = differences_of(runs)
    compared = f"{len(plain.validations)} evaluations, {mib(plain.state_bytes)} MiB saved"
    peaks = [max(each) for each in zip(*(run.peaks for run in doors), strict=True)]
    return [
        layout.name,
        str(layout.ranks),
        f"NO: {', '.join(different)}"
        if different
        else f"yes: {len(plain.iterations)} iterations, {compared}",
        ", ".join(f"{way} {run.seconds / plain.seconds:.2f}" for way, run in logged.items()),
        ", ".join(map(mib, runs["keep"].peaks)) if "keep" in runs else "",
        ", ".join(map(mib, peaks)),
        " / ".join(mib(run.total("offloaded_bytes")) for run in doors),
    ]


def mib(size: int) -> str:
    """Return a size in MiB."""
    return f"{size / 2**20:.1f}"


def run_layout(layout: Layout, ways: dict[str, Way]) -> dict[str, Run] | str:
    """Return all runs of one layout, or an error message."""
    runs: dict[str, Run] = {}
    for way, train in ways.items():
        click.echo(f"{layout.name}: {way}", err=True)
        try:
            runs[way] = train(layout)
        except (RunFailedError, RunLogError) as error:
            return f"{layout.name}, {way}: {error}"
    different = ", ".join(differences_of(runs))
    click.echo(f"{layout.name}: {f'{different} DIFFER' if different else 'the same bits'}", err=True)
    return runs


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--layout",
    "names",
    multiple=True,
    type=click.Choice([layout.name for layout in LAYOUTS]),
    help="Only this layout; may be repeated.  [default: all]",
)
@click.option("--iterations", type=click.IntRange(min=FIRST_PART + 1), default=5, show_default=True)
@click.option("--door", type=click.Choice([*DOORS, "both"]), default="both", show_default=True)
@click.option("--states", is_flag=True, help="Offload the states of the optimizer too.")
@click.option("--flags", default="", help="More flags of Megatron, such as --use-distributed-optimizer.")
@click.option("--resume", is_flag=True, help="Resume each training in another process.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for each run.")
@click.option(
    "--markdown", "file", type=click.Path(path_type=Path), help="Also write the table to this file."
)
def main(
    *, checkout: Path, names: list[str], door: str, flags: str, resume: bool, file: Path | None, **limits: Any
) -> None:
    """Train with CHECKOUT in every layout, with and without offloading, and compare."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clean up as after Ctrl-C
    if not (checkout / "pretrain_gpt.py").is_file():
        raise click.BadParameter(f"{checkout} has no pretrain_gpt.py", param_hint="CHECKOUT")
    doors = DOORS if door == "both" else (door,)
    wanted = [layout for layout in LAYOUTS if layout.name in names] or list(LAYOUTS)
    wanted = [replace(layout, flags=f"{layout.flags} {flags}") for layout in wanted]
    with tempfile.TemporaryDirectory(prefix="tba-matrix-") as place:
        matrix = Matrix(checkout, Path(place), **limits)
        try:
            if "patch" in doors:
                matrix.patch()
        except RunFailedError as error:
            raise click.ClickException(str(error)) from None
        results = [(layout, run_layout(layout, matrix.ways(doors, resume=resume))) for layout in wanted]
    good = [(layout, runs) for layout, runs in results if isinstance(runs, dict)]
    rows = [cells(layout, runs) for layout, runs in good]
    show(HEADS, rows)
    problems = [failure for _, failure in results if isinstance(failure, str)]
    for layout, runs in good:
        problems += [
            f"{layout.name}, {way}: {each}" for way, found in differences_of(runs).items() for each in found
        ]
    for problem in problems:
        click.echo(problem, err=True)
    try:
        release = Checkout.at(checkout).release
    except PatchError:
        release = checkout.name
    if file is not None:
        lines = "".join(f"| {' | '.join(line)} |\n" for line in (HEADS, ["---"] * len(HEADS), *rows))
        file.write_text(f"### {release}\n\n{lines}" + "".join(f"\n{problem}\n" for problem in problems))
    click.echo(f"{release}: {len(results)} layouts, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
