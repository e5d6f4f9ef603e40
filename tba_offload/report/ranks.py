"""One run on several ranks: the names of their run logs, and how these become one."""

from __future__ import annotations

import itertools
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
    """Return the run log of one rank: ``run.rank3.jsonl`` for ``run.jsonl``."""
    name = Path(path)
    return name.with_name(f"{name.name.removesuffix('.jsonl')}.rank{rank}.jsonl")


def free_run_log(
    path: str | os.PathLike[str],
    rank: int,
    ranks: int,
    *,
    agreed: Callable[[int], int] = lambda number: number,
) -> tuple[Path, Path]:
    """Return the run log that a rank would write in an empty directory, and the first free one in number.

    The second run to ``run.jsonl`` has the number 2 and the name ``run.2.jsonl``.

    Args:
        path: The path that the user gave.
        rank: The rank.
        ranks: How many there are; one alone has no number in the name of its file.
        agreed: Makes one number of those that ranks have found. Default: each goes by its own.
    """
    name = Path(path)
    if ranks > 1:  # a program may have named the rank so already
        name = name.with_name(name.name.replace(f".rank{rank}.jsonl", ".jsonl"))
    stem = name.name.removesuffix(".jsonl")

    def own(number: int) -> Path:
        found = name.with_name(f"{stem}.{number}.jsonl") if number > 1 else name
        return path_of_rank(found, rank) if ranks > 1 else found

    free = next(number for number in itertools.count(1) if not os.path.lexists(own(number)))
    return own(1), own(agreed(free))


def paths_of_ranks(path: str | os.PathLike[str]) -> list[Path]:
    """Return the run logs that stand for ``path``: itself, or where it does not exist those of its ranks."""
    name = Path(path)
    ranks: dict[int, Path] = {}
    if not os.path.lexists(name):
        for found in name.parent.glob("*.jsonl"):
            rank = _RANK.search(found.name)
            if rank and path_of_rank(name, int(rank[1])) == found:
                ranks[int(rank[1])] = found
    return [ranks[rank] for rank in sorted(ranks)] or [name]


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunLog]:
    """Read run logs; those of the ranks of one run become one.

    Args:
        paths: Run logs. Where ``run.jsonl`` does not exist, it stands for ``run.rank0.jsonl``,
            ``run.rank1.jsonl``, …

    Raises:
        RunLogError: A log cannot be read, or the log of a rank is missing.
    """
    groups: dict[object, list[RunLog]] = defaultdict(list)
    for log in (read_run_log(found) for path in paths for found in paths_of_ranks(path)):
        groups[log.header.run or object()].append(log)  # a run without a name stands for itself
    return [merged(logs) for logs in groups.values()]


def merged(logs: Sequence[RunLog]) -> RunLog:
    """Return one log for all ranks of a run.

    Work and bytes moved are sums over the ranks. Times are those of the slowest rank and peaks those of the
    fullest, because a step is over when all ranks are, and every rank has a device of its own.

    Args:
        logs: One for each rank, at least one.

    Raises:
        RunLogError: A rank has no log, or two.
    """
    first, *others = sorted(logs, key=lambda log: log.header.rank)
    ranks, count = {log.header.rank for log in logs}, first.header.ranks
    missing = next((rank for rank in range(count) if rank not in ranks), None)
    if missing is not None or len(logs) > count:
        what = "one rank has two" if missing is None else f"that of rank {missing} is missing"
        raise RunLogError(f"{first.path}: a run of {count} ranks has as many logs, and {what}")
    if not others:
        return first
    by_number = [{step.step: step for step in log.steps} for log in (first, *others)]
    common = [number for number in by_number[0] if all(number in steps for steps in by_number)]
    return replace(
        first,
        path=first.path.with_name(_RANK.sub("", first.path.name)),
        steps=tuple(_merged_step([steps[number] for steps in by_number]) for number in common),
        truncated=any(log.truncated for log in logs),
    )


def _merged_step(records: Sequence[StepRecord]) -> StepRecord:
    values: dict[str, Any] = {}
    for name in _NAMES:
        known = [value for record in records if (value := getattr(record, name)) is not None]
        values[name] = _how(name)(known) if known else None
    # Ranks wait for one another in either phase: the most of each would be longer than the step of any.
    slowest = max(records, key=lambda record: record.seconds_with_update)
    return StepRecord(**values | {"seconds": slowest.seconds, "optimizer_seconds": slowest.optimizer_seconds})


_NAMES = [each.name for each in fields(StepRecord) if each.name != "extra"]
_MOST = ("seconds", "peak", "gradient_bytes", "state_bytes", "base_bytes", "earlier_outputs_bytes")
_SPECIAL: dict[str, Callable[[list[Any]], Any]] = {
    "step": min,
    "peak_source": min,
    "peak_samples": min,
    "loss": lambda values: sum(values) / len(values),
    "skipped": any,
    "activation_budget_bytes": min,  # of the device that has least left
}


def _how(name: str) -> Callable[[list[Any]], Any]:
    """Return what makes one value of those of all ranks."""
    return _SPECIAL.get(name) or (max if any(part in name for part in _MOST) else sum)
