"""One run on several ranks: their run logs become one."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_offload.errors import RunLogError
from tba_offload.report.log_reader import read_run_log
from tba_offload.report.run_log import RunLog, StepRecord

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

_RANK = re.compile(r"\.rank(\d+)(?=\.jsonl$)")


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the run log of one rank, of a run that logs to ``path``.

    ``run.rank3.jsonl`` for ``run.jsonl``.
    """
    name = Path(path)
    return name.with_name(f"{name.name.removesuffix('.jsonl')}.rank{rank}.jsonl")


def numbered(path: str | os.PathLike[str], number: int) -> Path:
    """Return the run log of the run that is this in number: ``run.jsonl``, then ``run.2.jsonl``."""
    name = Path(path)
    return name if number == 1 else name.with_name(f"{name.name.removesuffix('.jsonl')}.{number}.jsonl")


def free_run_log(
    path: str | os.PathLike[str], rank: int, ranks: int, *, agreed: Callable[[int], int] | None = None
) -> tuple[Path, Path]:
    """Return the run log that a rank would write if none was there, and the first one in number that is free.

    Args:
        path: What the run logs to.
        rank: The rank.
        ranks: How many there are; one alone has no number in the name of its file.
        agreed: Makes one number of those that ranks have found; by default each goes by its own.
    """

    def own(number: int) -> Path:
        name = numbered(path, number)
        return path_of_rank(name, rank) if ranks > 1 else name

    free = next(number for number in itertools.count(1) if not _is_used(own(number)))
    return own(1), own(free if agreed is None else agreed(free))


def _is_used(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def paths_of_ranks(path: str | os.PathLike[str]) -> list[Path]:
    """Return the run logs that stand for ``path``: itself, or where it does not exist those of its ranks."""
    name = Path(path)
    with suppress(
        OSError
    ):  # a name that is too long, a directory that may not be entered: reading it says so
        if not name.exists():
            return sorted(_of_ranks(name), key=_rank) or [name]
    return [name]


def _of_ranks(name: Path) -> Iterator[Path]:
    stem = name.name.removesuffix(".jsonl")
    return (found for found in name.parent.glob("*.jsonl") if _RANK.sub("", found.name) == f"{stem}.jsonl")


def read_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunLog]:
    """Read run logs; those of the ranks of one run become one.

    Args:
        paths: Run logs. Where ``run.jsonl`` does not exist, it stands for ``run.rank0.jsonl``,
            ``run.rank1.jsonl``, …

    Raises:
        RunLogError: A log cannot be read, or the log of a rank is missing.
    """
    groups: dict[object, list[RunLog]] = defaultdict(list)
    for path in paths:
        for found in paths_of_ranks(path):
            log = read_run_log(found)
            groups[log.header.run or object()].append(log)  # a run without a name stands for itself
    return [merged(logs) for logs in groups.values()]


def merged(logs: Sequence[RunLog]) -> RunLog:
    """One log for all ranks of a run.

    Work and bytes moved are sums over the ranks. Times are those of the slowest rank and peaks those of the
    fullest, because a step is over when all ranks are, and every rank has a device of its own.

    Args:
        logs: One for each rank, at least one.

    Raises:
        RunLogError: A rank has no log, or two.
    """
    logs = sorted(logs, key=lambda log: log.header.rank)
    first = logs[0]
    ranks = [log.header.rank for log in logs]
    missing = next((rank for rank, found in enumerate(sorted(set(ranks))) if rank != found), len(set(ranks)))
    if missing < first.header.ranks or len(ranks) > first.header.ranks:
        what = f"that of rank {missing} is missing" if missing < first.header.ranks else "one rank has two"
        raise RunLogError(f"{first.path}: a run of {first.header.ranks} ranks has as many logs, and {what}")
    if len(logs) == 1:
        return first
    # By number: the last steps may be missing from some, and steps in a gap of one log.
    numbered_steps = [{step.step: step for step in log.steps} for log in logs]
    common = [number for number in numbered_steps[0] if all(number in steps for steps in numbered_steps)]
    return replace(
        first,
        path=first.path.with_name(_RANK.sub("", first.path.name)),
        steps=tuple(_merged_step([steps[number] for steps in numbered_steps]) for number in common),
        truncated=any(log.truncated for log in logs),
        bad_lines=tuple(line for log in logs for line in log.bad_lines),
        skipped=sum(log.skipped for log in logs),
    )


def _merged_step(records: Sequence[StepRecord]) -> StepRecord:
    merged = StepRecord(**{name: _merge(name, records, how) for name, how in _HOW.items()})
    # Ranks wait for one another in either phase: the most of each would be longer than the step of any.
    slowest = max(records, key=lambda record: record.seconds_with_update)
    return replace(merged, seconds=slowest.seconds, optimizer_seconds=slowest.optimizer_seconds)


def _merge(name: str, records: Sequence[StepRecord], how: Callable[[list[Any]], Any]) -> Any:
    known = [value for record in records if (value := getattr(record, name)) is not None]
    return how(known) if known else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _first(values: list[Any]) -> Any:
    return values[0]


def _how(name: str) -> Callable[[list[Any]], Any]:
    """How the values of a field become one."""
    special: dict[str, Callable[[list[Any]], Any]] = {
        "step": _first,
        "peak_source": _first,
        "loss": _mean,
        "gradients_allocated": all,
        "skipped": any,
        "gradient_bytes": max,  # like peaks, of the device that has most of them
        "state_bytes": max,
        "base_bytes": max,
        "earlier_outputs_bytes": max,
        "activation_budget_bytes": min,  # of the device that has least left
    }
    if name in special:
        return special[name]
    return max if "seconds" in name or "peak" in name else sum


_HOW = {item.name: _how(item.name) for item in fields(StepRecord) if item.name != "extra"}


def _rank(path: Path) -> int:
    found = _RANK.search(path.name)
    return int(found[1]) if found else 0
