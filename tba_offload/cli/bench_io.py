"""``tba-offload bench-io``: how fast drives move blocks of several sizes, and the settings that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from tba_offload.cli.shared import JSON, say, size
from tba_offload.formatting import readable_rate, readable_size, significant, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.store.bench import Advice, Cell


def _sizes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(found for value in values if (found := size(context, parameter, value)) is not None)


@click.command("bench-io")
@click.argument(
    "directories", metavar="DIR...", nargs=-1, required=True, type=click.Path(readable=False, path_type=Path)
)
@click.option(
    "--block",
    "blocks",
    metavar="SIZE",
    multiple=True,
    callback=_sizes,
    help="Size of a transfer; may be given several times.  [default: 256KiB, 1MiB, 4MiB, 16MiB, 64MiB]",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    multiple=True,
    help="Threads in each direction; may be given several times.  [default: 1, 2, 4]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, max=3600),
    default=0.5,
    show_default=True,
    help="How long each size is measured by each number of threads in each direction.",
)
@click.option(
    "--kind", type=click.Choice(["file", "gds"]), default="file", show_default=True, help="Kind of store."
)
@click.option("--no-checksum", is_flag=True, help="Measure as with store.checksum: false.")
@JSON
def bench_io(
    directories: tuple[Path, ...],
    blocks: tuple[int, ...],
    threads: tuple[int, ...],
    seconds: float,
    kind: str,
    *,
    no_checksum: bool,
    as_json: bool,
) -> None:
    """Measure how fast each directory moves blocks, and print the settings that follow as YAML.

    The package's own store writes, reads, and does both at once, with two transfers in flight for each
    thread: bandwidth, and latency from the queue to the end, the median and that which one of a hundred
    exceeds. Up to a GiB is held in each directory. As fast as the drive is, it is written while this runs.
    Nothing stays there, whatever happens.
    """
    from tba_offload.device import streams
    from tba_offload.store.bench import BLOCKS, THREADS, advised, bench

    found: dict[str, list[Cell]] = {}
    device = streams.default_device()
    for directory in map(str, directories):
        if not as_json:
            click.echo(visible(directory))
            click.echo(_HEAD)
        try:
            found[directory] = bench(
                directory,
                device,
                kind=kind,
                blocks=blocks or BLOCKS,
                threads=threads or THREADS,
                seconds=seconds,
                checksum=not no_checksum,
                told=(lambda _: None) if as_json else (lambda cell: click.echo(_row(cell))),
                left_out=_say_left_out,
            )
        except TimeoutError as error:
            raise click.ClickException(
                f"{visible(directory)}: a transfer hangs; check the drive and the system log"
            ) from error
        except OSError as error:
            reason = visible(error.strerror or str(error))
            raise click.ClickException(f"{visible(directory)}: {reason}") from error
    advice = {directory: advised(cells) for directory, cells in found.items()}
    policy = _policy(advice, kind, checksum=not no_checksum)
    if as_json:
        document = {
            "directories": [
                {
                    "directory": directory,
                    "cells": [cell._asdict() for cell in cells],
                    "advice": advice[directory]._asdict(),
                }
                for directory, cells in found.items()
            ],
            "policy": yaml.safe_load(policy),
        }
        click.echo(json.dumps(document, indent=2))
        return
    for directory, each in advice.items():
        told = f"{readable_rate(each.write)} written, {readable_rate(each.read)} read at best"
        click.echo(f"# {visible(directory)}: {told}")
    click.echo(policy, nl=False)
    if len(advice) > 1:
        say(
            "several drives were measured one after another; what they share, as a controller, is not in this"
        )


_HEAD = f"  {'':5}  {'block':>8}  {'threads':>7}  {'in flight':>9}  {'bandwidth':>10}  {'p50':>8}  {'p99':>8}"


def _say_left_out(block: int, threads: int) -> None:
    say(
        f"blocks of {readable_size(block)} and more are not measured at {threads} "
        f"{'thread' if threads == 1 else 'threads'} in each direction: there is no room for them"
    )


def _row(cell: Cell) -> str:
    latencies = (f"{significant(1e3 * each)} ms" for each in (cell.p50_seconds, cell.p99_seconds))
    return (
        f"  {cell.direction:5}  {readable_size(cell.block_bytes):>8}  {cell.threads:>7}  {cell.in_flight:>9}"
        f"  {readable_rate(cell.bytes_per_second):>10}  {'  '.join(f'{each:>8}' for each in latencies)}"
    )


def _policy(advice: dict[str, Advice], kind: str, *, checksum: bool) -> str:
    """Return the settings as a policy; of several drives those of the one that needs most."""
    from tba_offload.config import OffloadConfig, StoreConfig, format_size

    every: Sequence[Advice] = list(advice.values())
    config = OffloadConfig(
        store=StoreConfig(
            kind=kind,
            directories=tuple(Path(directory).absolute() for directory in advice),
            checksum=checksum,
            writers=max(each.writers for each in every),
            readers=max(each.readers for each in every),
        ),
        min_tensor_bytes=max(each.least_bytes for each in every),
    )
    document: dict[str, Any] = {
        "store": {
            "kind": config.store.kind,
            "directories": list(map(str, config.store.directories)),
            **({} if checksum else {"checksum": False}),
            "writers": config.store.writers,
            "readers": config.store.readers,
        },
        "min_tensor_bytes": format_size(config.min_tensor_bytes),
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
