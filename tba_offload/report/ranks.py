"""Names of the run logs of several ranks, and functions that merge the logs of all ranks into one log."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.errors import RunLogError
from tba_offload.report.log import RunLog, StepRecord, read_run_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_RANK = re.compile(r"\.rank(\d+)(?=\.jsonl$)")


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of one rank's log, such as ``run.rank3.jsonl`` for ``run.jsonl`` and rank 3."""
    name = Path(path)
    return name.with_name(f"{name.name.removesuffix('.jsonl')}.rank{rank}.jsonl")


def paths_of_ranks(path: str | os.PathLike[str]) -> list[Path]:
    """Return ``path`` if the file exists. Otherwise return the paths of the logs of all ranks.

    If no rank has a log, return ``path``.
    """
    name = Path(path)
    ranks: dict[int, Path] = {}
    if not os.path.lexists(name):
        for found in name.parent.glob("*.jsonl"):
            rank = _RANK.search(found.name)
            if rank and path_of_rank(name, int(rank[1])) == found:
                ranks[int(rank[1])] = found
    return [ranks[rank] for rank in sorted(ranks)] or [name]


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunLog]:
    """Read run logs, and merge the logs of all ranks of a run into one log.

    Args:
        paths: Run logs. If ``run.jsonl`` does not exist, the logs of its ranks (``run.rank0.jsonl``,
            ``run.rank1.jsonl`` and so on) are read.

    Raises:
        RunLogError: A log cannot be read, or the log of a rank is missing.
    """
    groups: dict[object, list[RunLog]] = defaultdict(list)
    for log in (read_run_log(found) for path in paths for found in paths_of_ranks(path)):
        groups[log.header.run or object()].append(log)  # each log without a run name is a separate run
    return [merged(logs) for logs in groups.values()]


def merged(logs: Sequence[RunLog]) -> RunLog:
    """Merge the logs of all ranks of a run into one log.

    FLOPs, tokens and transferred bytes are summed over ranks. Times come from the slowest rank, because a
    step ends when all ranks end. Memory peaks come from the rank with the highest peak, because each rank has
    its own device.

    Args:
        logs: One log for each rank, at least one.

    Raises:
        RunLogError: A rank has no log, or has two logs.
    """
    first, *others = sorted(logs, key=lambda log: log.header.rank)
    ranks, count = {log.header.rank for log in logs}, first.header.ranks
    missing = next((rank for rank in range(count) if rank not in ranks), None)
    if missing is not None or len(logs) > count:
        what = "one rank has two logs" if missing is None else f"the log of rank {missing} is missing"
        raise RunLogError(f"{first.path}: a run of {count} ranks needs {count} logs, but {what}")
    if not others:
        return first
    by_number = [{step.step: step for step in log.steps} for log in (first, *others)]
    common = [number for number in by_number[0] if all(number in steps for steps in by_number)]
    return replace(
        first,
        path=first.path.with_name(_RANK.sub("", first.path.name)),
        steps=tuple(_merged_step([steps[number] for steps in by_number]) for number in common),
    )


def _merged_step(records: Sequence[StepRecord]) -> StepRecord:
    values: dict[str, Any] = {}
    for name in _NAMES:
        known = [value for record in records if (value := getattr(record, name)) is not None]
        merge = _SPECIAL.get(name) or (max if any(part in name for part in _MOST) else sum)
        values[name] = merge(known) if known else None
    # Both times include waits for other ranks. The sum of both maxima would exceed the step of every rank.
    slowest = max(records, key=lambda record: record.seconds_with_update)
    return StepRecord(**values | {"seconds": slowest.seconds, "optimizer_seconds": slowest.optimizer_seconds})


_NAMES = [each.name for each in fields(StepRecord)]
_MOST = ("seconds", "peak", "gradient_bytes", "state_bytes", "base_bytes", "earlier_outputs_bytes")
_SPECIAL: dict[str, Callable[[list[Any]], Any]] = {
    "step": min,
    "peak_source": min,
    "peak_samples": min,
    "loss": lambda values: sum(values) / len(values),
    "skipped": any,
    "activation_budget_bytes": min,  # the smallest budget of all ranks counts
}
