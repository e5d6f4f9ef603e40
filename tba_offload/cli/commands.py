"""The command line: ``tba-offload COMMAND``; ``python -m tba_offload`` is the same.

Each command imports what it needs when it runs, so that reading a log never waits for torch. What tba-offload
raises on purpose ends as one line on stderr and exit status 1; a wrong command line has exit status 2.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tba_offload import __version__
from tba_offload.cli.check import check
from tba_offload.errors import ConfigError, TbaError
from tba_offload.formatting import visible
from tba_offload.writing import write_regular

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Commands(click.Group):
    """A group whose commands may raise any :class:`TbaError`."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TbaError as error:
            said = error.problems if isinstance(error, ConfigError) else (error,)
            lines = (visible(" ".join(str(each).split())) for each in said)
            raise click.ClickException("\n".join(lines)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tba-offload")
def main() -> None:
    """Offload activations to NVMe while a large model trains."""


main.add_command(check)


@main.command()
@click.argument("runs", metavar="RUN.jsonl...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "pictures",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda _ctx, _param, value: _pictures(value),
    help="Draw the curve: .svg or .png; may be given several times.",
)
@click.option("--csv", "csv_file", metavar="FILE|-", help="Write the points as CSV; - prints nothing else.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--warmup",
    metavar="N",
    type=click.IntRange(min=0),
    help="Steps to skip at the start of each run.  [default: 2 of more than 4 steps, 1 of two to four]",
)
def rok(
    runs: tuple[Path, ...],
    pictures: tuple[Path, ...],
    csv_file: str | None,
    *,
    as_json: bool,
    warmup: int | None,
) -> None:
    """Compare runs by activation peak and throughput: recompute, offload, keep.

    Each run log gives one point. Prints the table, the Pareto set and what follows from them.
    """
    if as_json and csv_file == "-":
        raise click.UsageError("--json and --csv - both want the standard output")
    from tba_offload.report import rok as report

    points = report.points(runs, warmup=warmup, left_out=_say)
    for picture in pictures:
        with _writing(picture):
            report.draw(points, picture)
    if csv_file is not None and csv_file != "-":
        with _writing(csv_file):
            write_regular(csv_file, report.csv_text(points).encode())
    if as_json:
        click.echo(json.dumps({"points": report.rows(points), "advice": report.advice(points)}, indent=2))
    elif csv_file == "-":
        click.echo(report.csv_text(points), nl=False)
    else:
        report.show(points)


def _say(line: str) -> None:
    click.echo(visible(line), err=True)


def _pictures(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The paths, checked before any work is done."""
    from tba_offload.report.rok import picture_kind

    for path in paths:
        try:
            picture_kind(path)
        except ConfigError as error:
            raise click.BadParameter(str(error)) from error
    return paths


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}"
        ) from error


def _size(_context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """A size with its unit, as an option."""
    from tba_offload.config import parse_size

    try:
        size = None if text is None else parse_size(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if size == 0 and parameter.name not in {"window", "host"}:
        raise click.BadParameter("must be more than 0")
    return size


def _finite(_context: click.Context, _parameter: click.Parameter, number: float) -> float:
    if not math.isfinite(number):
        raise click.BadParameter(f"{number} is no number of drives")
    return number


@main.command()
@click.argument("run", metavar="RUN.jsonl", type=click.Path(path_type=Path))
@click.option(
    "--budget", callback=_size, metavar="SIZE", help="Plan for this activation peak, such as 12GiB."
)
@click.option(
    "--objective",
    type=click.Choice(["time", "memory", "endurance"]),
    help="What the plan is for: least step time, least memory without waiting, fewest written bytes.  "
    "[default: time with --budget, memory without]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the plan as a policy file, in place of a planned one but of no other.",
)
@click.option("--force", is_flag=True, help="Replace whatever file --output names.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    callback=lambda _context, _parameter, value: value and _pictures((value,))[0],
    help="Draw the frontier: .svg or .png.",
)
@click.option(
    "--write", callback=_size, metavar="SIZE", help="What if a second wrote this much, such as 3GiB."
)
@click.option("--read", callback=_size, metavar="SIZE", help="What if a second read this much.")
@click.option(
    "--drives",
    type=click.FloatRange(min=0, min_open=True),
    default=1,
    callback=_finite,
    help="What if there were so many times as many.",
)
@click.option("--window", callback=_size, metavar="SIZE", help="What if so much were in flight.")
@click.option(
    "--host",
    callback=_size,
    metavar="SIZE",
    help="What if so much host memory took what the drives have no time for; 0 for none.",
)
@click.option("--layers", type=click.IntRange(min=1), help="What if there were so many.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="What if there were so many.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def plan(
    run: Path,
    budget: int | None,
    objective: str | None,
    output: Path | None,
    picture: Path | None,
    *,
    force: bool,
    as_json: bool,
    **changes: Any,
) -> None:
    """Say what the planner would do with a run, before running it.

    From the run log of one process: the best plans for a sweep of budgets, and the plan for one budget.
    Without --budget it is the plan with the lowest peak at which compute waits for nothing and a step takes
    no longer than if everything was kept; where that peak is hardly lower, everything is kept.
    """
    from tba_offload.config.policy import Objective
    from tba_offload.report import plans
    from tba_offload.what_if import Situation

    wanted = None if objective is None else Objective(objective)
    if budget is None and wanted in {Objective.TIME, Objective.ENDURANCE}:
        raise click.UsageError(f"--objective {wanted} needs --budget: without one nothing would leave memory")
    situation = Situation.of(run, left_out=_say).changed(**changes)
    choices, best = situation.frontier(wanted), situation.plan(budget, wanted)
    report = situation.report(budget, best, choices)
    if picture is not None:
        with _writing(picture):
            plans.draw_frontier(report, picture)
    if output is not None:
        _write_policy(output, situation.policy_for(best, budget).to_yaml(), force=force)
    if as_json:
        click.echo(json.dumps(situation.as_json(best, report), indent=2))
    else:
        plans.show(report, None if output is None else str(output))


_PLANNED = "# Written by tba-offload plan, which replaces this file as long as this line stands here.\n"


def _write_policy(path: Path, text: str, *, force: bool) -> None:
    """Writes a planned policy, not over one that was not planned."""
    with _writing(path):
        if path.exists() and not force and not _was_planned(path):
            raise click.ClickException(
                f"{path}: was not written by this command, so it stays as it is; choose another name, or "
                "replace it with --force"
            )
        write_regular(path, (_PLANNED + text).encode())


def _was_planned(path: Path) -> bool:
    from tba_offload.config import MOST_TEXT
    from tba_offload.reading import UnreadableError, read_regular

    try:
        return read_regular(path, MOST_TEXT).startswith(_PLANNED.encode())
    except UnreadableError:
        return False


class _PolicyType(click.Path):
    """A file that exists, or the word auto."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Path(value) if value == "auto" else super().convert(value, param, ctx)


@main.command()
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tba-demo"),
    show_default=True,
    help="Directory for run logs, pictures and summary.",
)
@click.option("--layers", type=click.IntRange(min=1), default=12, show_default=True)
@click.option(
    "--hidden", type=click.IntRange(min=1), help="Width.  [default: what fits the machine, at most 1536]"
)
@click.option("--heads", type=click.IntRange(min=1), default=12, show_default=True)
@click.option(
    "--sequence", type=click.IntRange(min=1), help="Tokens.  [default: what fits the machine, at most 160]"
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    default=(2, 3),
    show_default=True,
    help="Sequences in a step; may be given several times.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=5),
    help="Steps of each strategy and batch size.  [default: what fits the machine, at most 20]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp32"]),
    default="auto",
    show_default=True,
    help="auto measures which is faster on this machine.",
)
@click.option("--style", type=click.Choice(["gpt", "llama"]), default="gpt", show_default=True)
@click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True)
@click.option(
    "--directory",
    "directories",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="Where offloaded bytes go, one for each drive.  [default: a directory under the output]",
)
@click.option(
    "--window",
    help="Bytes in flight at the smallest batch size; grows with the batch size.  [default: 10MiB at width "
    "1536, sequence 160 and batch size 2 in bf16, else in proportion]",
)
@click.option(
    "--policy",
    type=_PolicyType(),
    help="YAML file with the policy of the offload strategy, whose budget replaces --window; or auto.",
)
@click.option(
    "--budget", metavar="SIZE|SHARE", help="Activation peak for auto: 64MiB, or 35% of keep's peak."
)
@click.option("--threads", type=click.IntRange(min=1), help="Compute threads of each process.")
@click.option(
    "--fault",
    "faults",
    metavar="FAULT",
    multiple=True,
    help="What goes wrong in the drives of the offload strategy: flip-read:n=3 flips a bit of the third "
    "read, fail-write:errno=EIO,after=5 fails all writes after five; hang-write:after=5, "
    "lost-write:chance=0.1 and so on. May be given several times.",
)
@click.option(
    "--control",
    is_flag=True,
    help="Let keep race twice: what the two differ by is the noise of the machine.",
)
@click.option(
    "--time-limit",
    metavar="MINUTES",
    type=click.FloatRange(min=0, min_open=True),
    default=10,
    show_default=True,
    help="Stop early if it is going to take longer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON and nothing else.")
def demo(*, as_json: bool, time_limit: float, **options: Any) -> None:
    """Train a small Megatron GPT on real text three ways at once and compare them.

    keep, recompute and offload (or auto) alternate step by step, each in a process of its own. Prints the
    table, and writes run logs, rok.svg, rok.png and summary.json to the output directory. Width, sequence and
    steps that are not given are chosen so that it takes some four minutes at most and fits memory and disk.
    Needs megatron-core and matplotlib: pip install 'tba-offload[megatron,plots]'.
    """
    from tba_lab.demo.console import run_on_console

    run_on_console(as_json=as_json, time_limit=time_limit, **options)


@main.command()
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def doctor(directories: tuple[Path, ...], *, as_json: bool) -> None:
    """Say which way bytes take to each directory, how fast, and what would help.

    By default the directory is the system's for temporary files. Some dozens of MiB are written to and read
    from each, by every way that there is: through host memory, and on a GPU by GPUDirect Storage, through the
    nvidia-fs driver or by PCIe peer-to-peer, where kvikio and cuFile offer it.
    """
    import tempfile

    from tba_offload.device import streams
    from tba_offload.store.doctor import examine, lines

    findings = examine(directories or (Path(tempfile.gettempdir()),), streams.default_device())
    click.echo(json.dumps(findings, indent=2) if as_json else "\n".join(lines(findings)))
    if any(each["auto"] is None for each in findings["directories"]):
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Change nothing; say whether it would work.")
@click.option("--reverse", is_flag=True, help="Take the patch out again.")
def patch(directory: Path, *, check: bool, reverse: bool) -> None:
    """Give the scripts of a Megatron-LM checkout the --tba- flags.

    DIR is its root. Patching twice changes nothing. A tree of a release that there is no patch for, or with
    uncommitted changes in the files to be patched, is refused and stays as it is.
    """
    from tba_offload.megatron.patch import Checkout

    checkout = Checkout.at(directory)
    changes = checkout.unpatch(check=check) if reverse else checkout.patch(check=check)
    if reverse:
        done, would, nothing = "patch taken out", "the patch can be taken out", "is not patched"
    else:
        done, would, nothing = "patched", "can be patched", "is patched already"
    state = (would if check else done) if changes else nothing
    click.echo(f"{directory} ({checkout.release}): {state}")


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--cpu", is_flag=True, help="Train on the CPU, with gloo; for trying things out.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def launch(*, cpu: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run an untouched Megatron-LM training script with offloading.

    SCRIPT is the pretrain_gpt.py of a checkout; among its ARGUMENTS are the flags that begin with --tba-, see
    its own --help. For several processes: torchrun ... -m tba_offload.megatron.launch SCRIPT ARGUMENTS.
    """
    from tba_offload.megatron.launch import CPU, launch

    launch([*([CPU] if cpu else []), script, *arguments])
