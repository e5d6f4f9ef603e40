"""Every fault of a drive against every way to use one: what is noticed, what comes of it, what is left over.

    python benchmarks/faults.py            # the full matrix
    python benchmarks/faults.py --short    # each fault once

Each case trains a small model for three steps: one on healthy drives, one with the fault, which is done again
if a named error ended it, and one after the fault is gone; files grow in the first step, so faults in growing
come there. Losses and parameters are compared, bit for bit, with training that never heard of offloading.
Cases run in processes of their own, with a limit each. A case is wrong if a number changed and nothing was
said although checksums were on, if the step after the fault is not the one that it would have been, if
threads, descriptors or extents stay, or if it does not end.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import platform
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import click
import torch
from faults import GROW, SILENT_KINDS, Fault, Strike, inject
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.errors import TbaError
from tba_offload.store import run_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

FAULTS = (
    *("fail-write:n=3", "fail-write:after=3,errno=EROFS", "fail-write:after=3,errno=ENODEV"),
    *("fail-write:n=3,errno=EAGAIN", "fail-write:n=3,errno=ENOMEM", "fail-write:bytes=256KiB,errno=ENOSPC"),
    *("fail-grow", "fail-grow:errno=EIO", "fail-grow:drive=0,errno=EROFS", "hang-grow:n=1"),
    *("delay-grow:seconds=0.01",),
    *("fail-read:n=2", "fail-read:after=2", "fail-read:n=2,errno=EAGAIN"),
    *("short-write:n=2", "short-read:n=2", "nothing-write:n=2", "nothing-read:n=2"),
    *("zeros-write:n=2", "zeros-read:n=2", "flip-write:n=2", "flip-read:n=2", "flip-read", "lost-write:n=2"),
    *("delay-write:seconds=0.01", "delay-read:seconds=0.01", "hang-write:n=2", "hang-read:n=2"),
)
PLACEMENTS = {
    "keep": {"default": "keep"},
    "offload": {"default": "offload"},
    "mixed": {
        "default": "offload",
        "layers": [
            {"match": 0, "placement": "keep"},
            {"match": 2, "placement": "recompute"},
            {"match": 3, "placement": "recompute-offload"},
        ],
    },
    "auto": {"default": "auto"},
}
SCHEDULES = {
    "one batch": ("f0", "b0"),
    "accumulation": ("f0", "b0", "f1", "b1", "f2", "b2"),
    "1F1B": ("f0", "f1", "b0", "f2", "b1", "b2"),
}
"""The order of forward and backward passes of micro-batches in a step."""

LAYERS, WIDTH, ROWS = 5, 128, 160
HANGS_AFTER = 0.5
"""Seconds of a standstill that are an error where a drive hangs."""

LIMIT = 60.0
"""Seconds after which a case is taken to hang."""

GROWTH = 1 << 16
"""Bytes by which files grow in the cases of faults in growing."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    fault: str
    placement: str
    drives: int
    schedule: str
    checksum: bool


@dataclass
class Row:
    """What came of a case.

    Attributes:
        struck: How often the fault was injected.
        joined: How often of these in a call that joins several extents; what fails there goes one by one.
        noticed: What told of it: an error, a figure of the step's record, a warning.
        reaction: In words; one of :data:`WRONG` if it may not be.
        losses: Whether those of the step with the fault, done again after an error, are what they should be.
        next_step: Whether loss and parameters after the step that follows are.
        left: Threads, descriptors and extents that are left over.
    """

    fault: str
    placement: str
    drives: int
    schedule: str
    checksum: bool
    struck: int = 0
    joined: int = 0
    noticed: str = ""
    reaction: str = ""
    losses: bool = True
    next_step: bool = True
    left: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether this must not be."""
        chosen = self.reaction == UNNOTICED
        return self.reaction in WRONG or bool(self.left) or not (chosen or (self.losses and self.next_step))


UNNOTICED = "unnoticed, as chosen"
SILENT, HUNG = "SILENT", "HUNG"
WRONG = (SILENT, HUNG)


def full() -> list[Case]:
    """All cases."""
    ways = itertools.product(FAULTS, PLACEMENTS, (1, 2), SCHEDULES, (True, False))
    return [Case(*way) for way in ways]


def short() -> list[Case]:
    """Each fault, and each of all else, at least once; what changes bytes with and without checksums."""
    cases = []
    ways = itertools.cycle(itertools.product(("offload", "mixed", "auto"), (1, 2), SCHEDULES))
    for fault in FAULTS:
        checksums = (True, False) if Fault.parse(fault).is_silent else (True,)
        cases += [Case(fault, *next(ways), checksum) for checksum in checksums]
    return [*cases, Case("flip-read", "keep", 1, "one batch", checksum=True)]


# One case


def make_model() -> nn.Module:
    """Return the same weights every time."""
    torch.manual_seed(1)
    layers = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
    )
    return nn.Sequential(*layers)


def batch(step: int, micro_batch: int) -> Tensor:
    """Return the same data every time."""
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randn(ROWS, WIDTH, generator=generator)


def forward_and_backward(model: nn.Module, step: int, schedule: Sequence[str]) -> list[float]:
    """Return the losses of a step's micro-batches."""
    losses: dict[str, Tensor] = {}
    for what, number in schedule:
        if what == "f":
            losses[number] = model(batch(step, int(number))).square().mean()
        else:
            losses[number].backward()
            losses[number] = losses[number].detach()
    return [loss.item() for loss in losses.values()]


def bits(model: nn.Module) -> list[Tensor]:
    """Return the parameters as integers."""
    return [parameter.detach().clone().view(torch.int32) for parameter in model.parameters()]


def train(schedule: Sequence[str]) -> tuple[list[list[float]], list[Tensor]]:
    """Losses and parameters of training without offloading."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        losses.append(forward_and_backward(model, step, schedule))
        optimizer.step()
        optimizer.zero_grad()
    return losses, bits(model)


def config_of(case: Case, directories: Sequence[str]) -> dict[str, Any]:
    """Return the policy of a case; everything that may travel does, in a narrow window."""
    hangs = Fault.parse(case.fault).kind == "hang"
    return {
        **PLACEMENTS[case.placement],
        "budget": {"in_flight_bytes": "256KiB"},
        "store": {
            "kind": "file",
            "directories": list(directories),
            "checksum": case.checksum,
            "stall_seconds": HANGS_AFTER if hangs else LIMIT,
        },
        "min_tensor_bytes": 0,
        "on_slow": "wait",
    }


def step_with_fault(case: Case) -> int:
    """Return the step with the fault: the second one, or the first where files grow and later no more."""
    return 0 if Fault.parse(case.fault).verb == GROW else 1


def run_case(case: Case, directories: Sequence[str], expected: tuple[list[list[float]], list[Tensor]]) -> Row:
    """Trains with the fault; see the top of this file."""
    if Fault.parse(case.fault).verb == GROW:
        with mock.patch.object(run_file, "_GROWTH", GROWTH):
            return _run_case(case, directories, expected)
    return _run_case(case, directories, expected)


def _run_case(
    case: Case, directories: Sequence[str], expected: tuple[list[list[float]], list[Tensor]]
) -> Row:
    row = Row(**asdict(case))
    before = left_now()
    model, schedule = make_model(), SCHEDULES[case.schedule]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tba.attach(model, config_of(case, directories), measure_memory=False) as session:
            losses = list(_steps(session, model, optimizer, schedule, case, row))
            extents = extents_left(session)
    told = {str(warning.message).split(":")[0] for warning in caught if warning.category is RuntimeWarning}
    row.losses = losses[step_with_fault(case)] == expected[0][step_with_fault(case)]
    row.next_step = losses == expected[0] and all(map(torch.equal, bits(model), expected[1]))
    row.noticed = "; ".join(filter(None, [row.noticed, *sorted(told)]))
    row.left = difference(before, left_now()) + (f" {extents} bytes of extents" if extents else "")
    row.reaction = reaction(case, row)
    return row


def _steps(
    session: tba.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Sequence[str],
    case: Case,
    row: Row,
) -> Iterator[list[float]]:
    """Three steps, one of them with the fault; their losses."""
    for number in range(3):

        def step(number: int = number) -> list[float]:
            with session.step():
                return forward_and_backward(model, number, schedule)

        yield _with_fault(session, step, optimizer, case, row) if number == step_with_fault(case) else step()
        optimizer.step()
        optimizer.zero_grad()


def _with_fault(
    session: tba.Session,
    step: Callable[[], list[float]],
    optimizer: torch.optim.Optimizer,
    case: Case,
    row: Row,
) -> list[float]:
    try:
        with inject(case.fault) as faults:
            losses = step()
            record = session.report()[-1]
            row.noticed = "; ".join(figure for figure in FIGURES if getattr(record, figure))
    except TbaError as error:
        row.noticed = f"{type(error).__name__} from {type(error.__cause__ or error).__name__}"
        optimizer.zero_grad()
    else:
        _note_strikes(row, faults.fired)
        return losses
    _note_strikes(row, faults.fired)
    return step()


def _note_strikes(row: Row, fired: Sequence[Strike]) -> None:
    row.struck = len(fired)
    row.joined = sum(strike.extents > 1 for strike in fired)


FIGURES = ("fallback_kept_bytes", "drives_out_of_service", "reread_bytes")
"""Figures of a step's record that tell of a fault."""


def reaction(case: Case, row: Row) -> str:
    """Return what came of the fault, in words."""
    fault = Fault.parse(case.fault)
    if not row.struck:
        return "no such call"
    if "Error" in row.noticed:
        return "named error"
    if not (row.losses and row.next_step):
        return UNNOTICED if fault.kind in SILENT_KINDS and not case.checksum else SILENT
    if "reread" in row.noticed:
        return "read again"
    if "fallback_kept" in row.noticed or "out_of_service" in row.noticed:
        return "kept in memory" if case.drives == 1 else "other drive or memory"
    if fault.kind in {"fail", "nothing"} and row.joined == row.struck:
        return "went one by one"
    if fault.kind in {"short", "delay", "hang"}:
        return {"short": "went on", "delay": "waited", "hang": "not waited for"}[fault.kind]
    return "bytes not needed" if fault.kind in SILENT_KINDS else SILENT


def extents_left(session: tba.Session) -> int:
    """Bytes of extents that are still taken when all transfers have had time to end."""
    gc.collect()
    deadline = time.monotonic() + LIMIT / 4
    while session.store.used_bytes and time.monotonic() < deadline:
        session.offloader.drain()
        time.sleep(0.001)
    return session.store.used_bytes


def left_now() -> Counter[str]:
    """Threads of ours and open descriptors."""
    gc.collect()
    threads = sum(thread.name.startswith("tba-") for thread in threading.enumerate())
    return Counter(threads=threads, descriptors=len(list(Path("/proc/self/fd").iterdir())))


def difference(before: Counter[str], after: Counter[str]) -> str:
    """Return what there is more of."""
    return " ".join(f"{after[what] - count} {what}" for what, count in before.items() if after[what] > count)


# All of them


def work(pipe: Connection, scratch: str) -> None:
    """Run the cases that the process is sent."""
    torch.set_num_threads(1)
    expected = {name: train(schedule) for name, schedule in SCHEDULES.items()}
    directories = [str(Path(scratch) / name) for name in "ab"]
    for path in directories:
        Path(path).mkdir(exist_ok=True)
    warm = Case("delay-read:n=1,seconds=0", "offload", 2, "1F1B", checksum=True)
    run_case(warm, directories, expected["1F1B"])  # what is opened once for all
    gc.collect()
    gc.freeze()  # what was imported is not looked at again: that would take most of a case
    pipe.send(None)
    while (case := pipe.recv()) is not None:
        pipe.send(run_case(case, directories[: case.drives], expected[case.schedule]))


class Worker:
    """A process for cases, and a new one where a case does not end."""

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._start()

    def run(self, case: Case) -> Row:
        """Return the row of a case; :data:`HUNG` if it does not end, and what was raised if it fails."""
        self._pipe.send(case)
        try:
            if self._pipe.poll(LIMIT):
                row: Row = self._pipe.recv()
                return row
            reaction = HUNG
        except EOFError:
            reaction = SILENT
        self.end()
        self._start()
        return Row(**asdict(case), reaction=reaction, noticed="see the traceback above")

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, self._scratch), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()


def run_all(cases: Sequence[Case], processes: int, tell: Callable[[Row], object]) -> list[Row]:
    """Return the rows of all cases, in their order."""
    rows: dict[Case, Row] = {}
    waiting = iter(cases)
    lock = threading.Lock()

    def serve() -> None:
        with tempfile.TemporaryDirectory(prefix="tba-faults-") as scratch:
            worker = Worker(scratch)
            try:
                while True:
                    with lock:
                        case = next(waiting, None)
                    if case is None:
                        return
                    rows[case] = worker.run(case)
                    tell(rows[case])
            finally:
                worker.end()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[case] for case in cases]


def line(row: Row) -> str:
    """Return a row for people."""
    checks = "on" if row.checksum else "off"
    same = f"losses {_same(row.losses)}, next step {_same(row.next_step)}"
    text = (
        f"{row.fault:38} {row.placement:8} {row.drives} {row.schedule:13} {checks:4} {row.struck:3} "
        f"{row.reaction:22} {same}; {row.noticed}"
    )
    return f"{text} LEFT {row.left}" if row.left else text


def _same(value: bool) -> str:  # noqa: FBT001 - a figure
    return "identical" if value else "DIFFERENT"


def counts(rows: Sequence[Row]) -> list[str]:
    """How often each fault had which reaction."""
    found = Counter((row.fault, row.reaction) for row in rows)
    return [
        f"{fault:38} "
        + ", ".join(f"{reaction} {n}" for (name, reaction), n in found.items() if name == fault)
        for fault in dict.fromkeys(row.fault for row in rows)
    ]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--short", "is_short", is_flag=True, help="Each fault once instead of the full matrix.")
@click.option("--processes", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(*, is_short: bool, processes: int, as_json: bool) -> None:
    """Run, prints, and fails if a row is wrong."""
    began = time.monotonic()
    tell = (lambda _: None) if as_json else (lambda row: click.echo(line(row)))
    rows = run_all(short() if is_short else full(), processes, tell)
    wrong = [row for row in rows if row.is_wrong]
    if as_json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        click.echo(json.dumps({"versions": versions, "rows": [asdict(row) for row in rows]}))
    else:
        click.echo("\n".join(["", *counts(rows), "", *(f"WRONG: {line(row)}" for row in wrong)]))
        click.echo(f"{len(rows)} cases, {len(wrong)} of them wrong, in {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
