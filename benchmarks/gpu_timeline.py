"""One step as a timeline: what the device computes, and what is copied, written and read meanwhile.

The trace is the profiler's own, for a trace viewer, with the transfers of the stores added. The picture shows
the same as lanes, and says how much of the transfers lay under computation.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from around import surrounded
from torch.profiler import ProfilerActivity, profile, record_function

from tba_offload.store.engine import QueuedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tba_offload.store.base import ActivationStore, Extent

Interval = tuple[float, float]
"""From, until, in seconds."""

Lanes = dict[str, list[Interval]]

MARK = "tba-offload step"
COMPUTE, TO_HOST, FROM_HOST = "compute", "copies to the host", "copies from the host"
WRITES, READS = "store writes", "store reads"
_COLOURS = {
    COMPUTE: "#4477aa",
    TO_HOST: "#ee6677",
    FROM_HOST: "#228833",
    WRITES: "#ccbb44",
    READS: "#66ccee",
}


def record(
    step: Callable[[], object], store: ActivationStore, activities: set[ProfilerActivity], path: Path
) -> Lanes:
    """Run a step under the profiler, writes its trace, and return its lanes.

    Args:
        step: What to run; it returns when the device is done.
        store: Whose transfers to watch.
        activities: What the profiler records.
        path: The trace to write, ``.json.gz``.
    """
    with profile(activities=activities) as profiler, watched(store) as transfers, record_function(MARK):
        began = time.perf_counter()
        step()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    trace = json.loads(plain.read_text())
    plain.unlink()
    add_transfers(trace, transfers, began)
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
    return lanes_of(trace)


@contextlib.contextmanager
def watched(store: ActivationStore) -> Iterator[Lanes]:
    """While the block runs, notes when transfers of a store, or of its parts, are under way."""
    found: Lanes = {WRITES: [], READS: []}
    lock = threading.Lock()
    parts = [part for part in (store, *getattr(store, "stores", ())) if isinstance(part, QueuedStore)]

    @contextlib.contextmanager
    def timed(verb: str, _: Extent) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with lock:
                found[WRITES if verb == "write" else READS].append((began, time.perf_counter()))

    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(surrounded(part, timed))
        yield found


def add_transfers(trace: dict[str, Any], transfers: Lanes, began: float) -> None:
    """Put transfers into a trace, as a process of their own.

    Args:
        trace: As the profiler wrote it.
        transfers: By :func:`time.perf_counter`.
        began: When :data:`MARK` began, by the same clock.
    """
    events = trace["traceEvents"]
    origin = _mark(events)["ts"] - 1e6 * began
    for lane, intervals in transfers.items():
        for start, end in intervals:
            events.append(
                {
                    "ph": "X",
                    "cat": "store",
                    "name": lane,
                    "pid": "tba-offload",
                    "tid": lane,
                    "ts": origin + 1e6 * start,
                    "dur": 1e6 * (end - start),
                }
            )


def lanes_of(trace: dict[str, Any]) -> Lanes:
    """Return the lanes of a trace, in seconds from the beginning of the step; overlapping intervals are one.

    Compute is the kernels of the device, or without one what the step's own thread does.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    mark = _mark(events)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    lanes: Lanes = {
        COMPUTE: _intervals(
            kernels
            or [
                event for event in events if event.get("cat") == "cpu_op" and event.get("tid") == mark["tid"]
            ],
            mark,
        )
    }
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    for lane, word in ((TO_HOST, "DtoH"), (FROM_HOST, "HtoD")):
        lanes[lane] = _intervals([event for event in copies if word in event["name"]], mark)
    for lane in (WRITES, READS):
        lanes[lane] = _intervals(
            [event for event in events if event.get("cat") == "store" and event["name"] == lane], mark
        )
    return lanes


def _mark(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(
        event for event in events if event.get("name") == MARK and event.get("cat") == "user_annotation"
    )


def _intervals(events: Sequence[dict[str, Any]], mark: dict[str, Any]) -> list[Interval]:
    spans = [(event["ts"] - mark["ts"], event["ts"] - mark["ts"] + event.get("dur", 0)) for event in events]
    return merged([(1e-6 * start, 1e-6 * end) for start, end in spans])


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the same time in intervals that do not touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def seconds(intervals: Sequence[Interval]) -> float:
    """How long they are together."""
    return sum(end - start for start, end in intervals)


def share_under(inner: Sequence[Interval], outer: Sequence[Interval]) -> float | None:
    """Return the share of one lane that lies under another; both merged. ``None`` if there is nothing."""
    if not inner:
        return None
    # What both cover is what each covers less what they cover together.
    common = seconds(inner) + seconds(outer) - seconds(merged([*inner, *outer]))
    return common / seconds(inner) if seconds(inner) else None


def summary(lanes: Lanes) -> dict[str, Any]:
    """Seconds of each lane, and the share that lay under computation."""
    return {
        name: {"seconds": seconds(lane), "share_under_compute": share_under(lane, lanes[COMPUTE])}
        for name, lane in lanes.items()
        if lane
    }


def draw(lanes: Lanes, title: str, path: Path) -> None:
    """Draws the lanes over the time of the step, as PNG or SVG by the suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [name for name, lane in lanes.items() if lane]
    figure = Figure(figsize=(11, 0.9 + 0.5 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, name in enumerate(reversed(shown)):
        bars = [(1e3 * start, 1e3 * (end - start)) for start, end in lanes[name]]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[name])
    labels = []
    for name in reversed(shown):
        share = share_under(lanes[name], lanes[COMPUTE])
        under = "" if name == COMPUTE or share is None else f"\n{share:.0%} under compute"
        labels.append(f"{name}{under}")
    axes.set_yticks(range(len(shown)), labels)
    axes.set_xlabel("milliseconds of the step")
    axes.set_title(title)
    figure.savefig(path)
