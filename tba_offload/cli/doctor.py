"""``tba-offload doctor``: where directories are, the ways of bytes to them, and how long drives last."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload.cli.shared import JSON, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tba_offload.report.endurance import Life
    from tba_offload.report.updates import Update

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Numbers by the letter that stands for them where models are named: 7B is seven billion."""


def _factor(_context: click.Context, _parameter: click.Parameter, number: float) -> float:
    if not math.isfinite(number):
        raise click.BadParameter(f"{number} is no factor")
    return number


def _parameters(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    """Return a number of parameters, as models are named by it."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    count = 0 if found is None else round(float(found[1]) * _COUNTS[found[2]])
    if count == 0:
        raise click.BadParameter(f"{text!r} is no number of parameters; write 7B, 350M or 350000000")
    return count


@click.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(readable=False, path_type=Path))
@click.option(
    "--run",
    metavar="RUN.jsonl",
    type=click.Path(path_type=Path),
    help="Say how long the drives last under this run: its bytes a step and its step time, day and night.",
)
@click.option(
    "--written", callback=size, metavar="SIZE", help="The same for a number of bytes a day, such as 5TB."
)
@click.option(
    "--rated",
    callback=size,
    metavar="SIZE",
    help="Bytes that the drives together may be written in their life (TBW), such as 600TB.  [default: by "
    "what the drives say of their wear]",
)
@click.option(
    "--amplification",
    metavar="FACTOR",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    callback=_factor,
    help="Bytes that drives write to their cells for each that they are given, beside what ratings count on.",
)
@click.option(
    "--parameters",
    callback=_parameters,
    metavar="COUNT",
    help="Say what optimizer states on these drives cost for that number of trained parameters, such as 7B.",
)
@JSON
def doctor(
    directories: tuple[Path, ...],
    run: Path | None,
    written: int | None,
    rated: int | None,
    amplification: float,
    parameters: int | None,
    *,
    as_json: bool,
) -> None:
    """Say where each directory is, which way bytes take to it, how fast, and what would help.

    By default the directory is the system's for temporary files. Some dozens of MiB are written to and read
    from each, on a GPU up to two GiB, by every way that there is: through host memory, and on a GPU by
    GPUDirect Storage, through the nvidia-fs driver or by PCIe peer-to-peer, where kvikio and cuFile offer it.
    Nothing is made that stays. Drives are asked how worn they are by smartctl or nvme, where one is installed
    and may. Exit status 1 if a directory cannot be used.
    """
    import tempfile

    from tba_offload.device import streams
    from tba_offload.store.doctor import examine, is_usable, lines

    if run is not None and written is not None:
        raise click.UsageError("--run and --written both say what is written in a day; give one of them")
    if run is None and written is None and (rated is not None or amplification != 1.0):
        raise click.UsageError(
            "--rated and --amplification are about what is written: give --run or --written"
        )
    for directory in directories:
        if sum(directory.absolute() == each.absolute() for each in directories) > 1:
            raise click.UsageError(f"{directory} is given twice; name each directory once")
    day = _of_run(run) if run is not None else written
    findings = examine(directories or (Path(tempfile.gettempdir()),), streams.default_device())
    told = lines(findings)
    if day is not None:
        life = _life(findings, day, rated, amplification)
        findings["life"] = None if life is None else life.as_json()
        told.append(f"life: {_UNKNOWN if life is None else life}")
    if parameters is not None and is_usable(findings):
        update = _update(findings, parameters)
        findings["states"] = update.as_json()
        told.append(f"states: {update}")
    click.echo(json.dumps(findings, indent=2) if as_json else "\n".join(told))
    if not is_usable(findings):
        raise click.exceptions.Exit(1)


_UNKNOWN = (
    "not known, because the drives do not tell what they allow to be written: --rated 600TB says the sum, by "
    "their data sheets"
)


def _of_run(path: Path) -> float:
    """Bytes that a run writes in a day.

    Raises:
        RunLogError: It cannot be read, or has no step.
    """
    from tba_offload.days import bytes_per_day
    from tba_offload.errors import RunLogError
    from tba_offload.report.digest import Digest
    from tba_offload.report.ranks import read_runs

    total = 0.0
    for log in read_runs([path]):
        digest = Digest.of(log)
        if not digest.seconds:
            raise RunLogError(f"{path}: no step is in it that took time, so there is nothing to project")
        total += bytes_per_day(digest.written_bytes, digest.seconds)
    return total


def _life(
    findings: dict[str, Any], bytes_per_day: float, rated: int | None, amplification: float
) -> Life | None:
    """How long the drives of all directories last together; ``None`` if nothing tells what they allow."""
    from tba_offload.report.endurance import Life

    worn = {wear["drive"]: wear for wear in _wear(findings)}.values()  # directories may share a drive
    allowed = [wear["allowed_bytes"] for wear in worn]
    is_told = bool(allowed) and None not in allowed
    if rated is None and not is_told:
        return None
    used = sum(wear["written_bytes"] or 0 for wear in worn)
    if rated is not None:
        return Life(bytes_per_day, rated, amplification, used)
    told = "by what they were written so far and the share of their life that this took"
    return Life(bytes_per_day, sum(allowed), amplification, used, told)


def _update(findings: dict[str, Any], parameters: int) -> Update:
    """Return what an update costs; directories on one drive share its speed and its room."""
    from tba_offload.report.updates import Update

    rates: dict[str, float] = {}
    free: dict[str, int] = {}
    for each in findings["directories"]:
        drive = (each["location"]["drive"] or {}).get("name", each["directory"])
        rate = each["ways"][each["auto"]["kind"]]["bytes_per_second"]["both"]
        rates[drive] = max(rates.get(drive, 0.0), rate)
        free[drive] = max(free.get(drive, 0), each["location"]["free_bytes"])
    return Update(parameters, sum(rates.values()), sum(free.values()))


def _wear(findings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in findings["directories"]:
        if each["location"] is not None:
            yield from each["location"]["wear"]
