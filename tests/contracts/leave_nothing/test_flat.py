"""Long runs, forks and sudden ends: nothing grows and nothing is left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest
import torch
from covering import EVERYTHING, of_which
from harness import (
    KIB,
    PATIENCE,
    PLACEMENTS,
    assert_all_given_back,
    quiesce,
    session_for,
    used_bytes,
    wait_until,
)
from models import History, Model, assert_same_history, loss_of, make_model, make_tokens, same_bits
from places import ROOT, SUPPORT
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tba_offload as tba
from tba_offload.device.meters import MallocMeter
from tba_offload.report.log import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from warm import Warm

    from tba_offload.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


# A thousand steps


def open_files() -> dict[str, str]:
    links = {link.name: link for link in Path("/proc/self/fd").iterdir()}
    return {name: str(link.readlink()) for name, link in links.items() if link.is_symlink()}


class Footprint(NamedTuple):
    descriptors: int
    threads: int
    live_bytes: int
    resident_bytes: int
    extents: int
    objects: Counter[str]


def footprint(session: Session) -> Footprint:
    gc.collect()
    quiesce(session.offloader)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(
        descriptors=len(open_files()),
        threads=len(list(Path("/proc/self/task").iterdir())),
        live_bytes=MallocMeter().live(),
        resident_bytes=pages * os.sysconf("SC_PAGESIZE"),
        extents=used_bytes(session.store),
        objects=own_objects(),
    )


def own_objects() -> Counter[str]:
    """How many objects of each of our classes are alive; a record per step is what ``report`` promises."""
    kinds = (type(thing) for thing in gc.get_objects())
    names = Counter(
        kind.__name__ for kind in kinds if str(kind.__module__).startswith(("tba_offload", "tba_lab"))
    )
    del names["StepRecord"]
    return names


def most_grown(before: Counter[str], after: Counter[str], *, but: Collection[str] = ()) -> int:
    return max((count for name, count in (after - before).items() if name not in but), default=0)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def short_steps(model: nn.Module, session: Session, steps: int) -> None:
    for number in range(steps):
        try:
            with session.step():
                for _ in range(2 if number % 7 == 0 else 1):
                    loss = model(torch.ones(8 + number % 13, 16)).sum()
                    if number % 10 == 9:
                        raise ZeroDivisionError
                    loss.backward()
        except ZeroDivisionError:
            pass
        model.zero_grad()


def test_many_steps_leave_everything_as_it_was(tmp_path: Path) -> None:
    """Twice as many in the full lane."""
    model, count = Small(), 200 if EVERYTHING else 100
    with session_for(model, directory=tmp_path, in_flight=8 * KIB, min_tensor_bytes=256) as session:
        short_steps(model, session, count)
        before = footprint(session)
        for _ in range(4):
            short_steps(model, session, count)
        after = footprint(session)
        assert sum(record.offloaded_bytes for record in session.records) > 0
    for same in ("descriptors", "threads", "extents"):
        assert getattr(after, same) == getattr(before, same), same
    assert before.extents == 0
    assert most_grown(before.objects, after.objects) < 50
    assert after.live_bytes - before.live_bytes < 1 << 20
    assert after.resident_bytes - before.resident_bytes < 8 << 20


LONG = 40
"""Steps, more than a model here has parameters, of each of which something may be replaced once."""


def all_objects() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())


@pytest.mark.parametrize("placement", of_which(PLACEMENTS, "offload", "recompute-offload"))
def test_a_loop_that_holds_its_loss_until_the_next_one_grows_by_records_only(placement: str) -> None:
    """What accumulates the gradient of a parameter outlives each step there: no hook may stay at it."""
    model = make_model(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps() -> None:
        nonlocal loss
        for number in range(LONG):
            loss = loss_of(model, make_tokens(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    loss, record = torch.zeros(()), f"{StepRecord.__module__}.StepRecord"
    with session_for(model, default=placement, measure_memory=True) as session:
        steps()
        quiesce(session.offloader)
        before = all_objects()
        steps()
        quiesce(session.offloader)
        assert session.records[-1].activation_peak_bytes
        assert (all_objects() - before)[record] == LONG
        # One in each step would be as many. A worker drops cancelled transfers when it comes to them.
        wait_until(
            lambda: most_grown(before, all_objects(), but=(record, "builtins.dict", "builtins.list")) < LONG,
            "nothing grows but records and their parts",
        )


def test_a_closed_session_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    model = Small()
    train_once = lambda: short_steps(model, session, 2)  # noqa: E731
    with session_for(model, directory=tmp_path, measure_memory=True) as session:
        train_once()  # what PyTorch starts of its own stays
    before = set(threading.enumerate()), open_files()
    with session_for(model, directory=tmp_path, measure_memory=True) as session:
        train_once()
    assert (set(threading.enumerate()), open_files()) == before
    assert list(tmp_path.iterdir()) == []


# Sudden ends


def start(script: str, directory: Path) -> subprocess.Popen[str]:
    prelude = """
        import sys, torch, warnings
        from harness import quiesce, session_for, used_bytes
        from models import make_model, loss_of, make_tokens, train
        from tba_offload import NothingSavedWarning
        warnings.simplefilter("ignore", NothingSavedWarning)  # a wide window leaves much I/O pending
        torch.set_num_threads(1)
        model = make_model(layers=2)
        session = session_for(model, directory=sys.argv[1], in_flight=1 << 20)
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", source, os.fspath(directory)],
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    neighbour = tmp_path / "neighbour"
    neighbour.write_text("of another run")
    script = """
        with session.step():
            loss = loss_of(model, make_tokens(0))
            quiesce(session.offloader)
            print(used_bytes(session.store), flush=True)
            sys.stdin.read()
    """
    process = start(script, tmp_path)
    with process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == [neighbour]


def test_the_interpreter_exits_cleanly_with_io_pending(tmp_path: Path) -> None:
    script = """
        session.step().__enter__()
        losses = [loss_of(model, make_tokens(number)) for number in range(4)]
    """
    output, errors = (process := start(script, tmp_path)).communicate()
    assert (process.returncode, errors) == (0, ""), output
    assert list(tmp_path.iterdir()) == []


# Forks


def in_child(work: Callable[[], Any]) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        do_and_exit(work, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told, "the child hung"
    result = pickle.loads(told)
    if isinstance(result, AssertionError):
        raise result
    return result


def do_and_exit(work: Callable[[], Any], writer: int) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(PATIENCE))  # ends a child that hangs
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist here
    outcome: object = AssertionError("interrupted")
    try:
        outcome = work()
    except BaseException:  # noqa: BLE001 - told to the parent
        outcome = AssertionError(traceback.format_exc())
    finally:
        os.write(writer, pickle.dumps(outcome))
        os._exit(0)


def files_in(directory: Path) -> list[str]:
    return [target for target in open_files().values() if target.startswith(os.fspath(directory))]


@pytest.fixture
def model() -> Model:
    return make_model(layers=2)


def step_with_fork(
    model: Model, session: Session | None, work: Callable[[], object]
) -> tuple[list[Tensor], object]:
    loss = loss_of(model, make_tokens(0))
    if session is not None:
        quiesce(session.offloader)
    result = in_child(work)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], result


def test_a_forked_child_holds_no_descriptor_and_the_parent_goes_on(model: Model, tmp_path: Path) -> None:
    expected, _ = step_with_fork(model, None, lambda: None)
    model.zero_grad()
    with session_for(model, directory=tmp_path, in_flight=1 << 20) as session:
        with session.step():
            assert files_in(tmp_path)
            found, in_the_child = step_with_fork(model, session, lambda: files_in(tmp_path))
        assert in_the_child == []
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        assert session.records[0].read_bytes > 0
        assert_all_given_back(session)


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except tba.SessionError as error:
        return str(error)
    return "not refused"


def test_a_forked_child_cannot_use_the_session(model: Model) -> None:
    with session_for(model) as session, session.step():
        loss = loss_of(model, make_tokens(0))
        quiesce(session.offloader)
        steps = in_child(lambda: refused(session.step().__enter__))
        assert "parent process" in steps
        assert "Call attach() in the child" in steps
        assert "forked" in in_child(lambda: refused(loss.backward))
        assert in_child(session.close) is None
        loss.backward()


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return make_tokens(index, batch=1)[0]


def train_with_workers(model: Model, session: Session | None) -> History:
    history = History()
    loader = DataLoader(Tokens(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for tokens in loader:
        with session.step() if session is not None else torch.enable_grad():
            loss = loss_of(model, tokens)
            loss.backward()
        history.losses.append(loss.detach())
        history.gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return history


def test_workers_of_a_data_loader(model: Model, tmp_path: Path) -> None:
    expected = train_with_workers(model, None)
    with session_for(model, directory=tmp_path) as session:
        assert_same_history(train_with_workers(model, session), expected)
        assert_all_given_back(session)


# Ctrl-C: it arrives, wherever it strikes


def test_an_interrupt_anywhere_in_a_step_arrives_and_leaves_nothing(python_with_torch: Warm) -> None:
    """After each interrupted step the next one gives the same bits, and all books are at zero."""
    assert_all_arrive(python_with_torch, "steps", 200 if EVERYTHING else 50)


def test_an_interrupt_anywhere_in_an_update_arrives_and_loses_no_state(python_with_torch: Warm) -> None:
    """Each state is that of before or of after, and training goes on."""
    assert_all_arrive(python_with_torch, "updates", 200 if EVERYTHING else 20)


def assert_all_arrive(python: Warm, what: str, trials: int) -> None:
    done = python.run(str(SUPPORT / "interrupts.py"), what, str(trials), timeout=250)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith(f"{trials} trials at ")


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
