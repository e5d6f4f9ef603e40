"""Measure whether the activation peak grows with the number of layers.

    python benchmarks/depth.py

For each number of layers, three processes train the same model in alternating steps: with keep, again with
keep, and with offload. With keep, the activation peak grows with the number of layers. With offload, the peak
should stay the same. The difference between the two processes with keep is noise.
"""

from __future__ import annotations

from typing import Any

import click
from lanes import CONTROL, directory_option, dtype_option, json_option, print_table, race_ways, shape_of


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--depth", "depths", type=int, multiple=True, default=(6, 12, 24, 48), show_default=True)
@click.option("--hidden", default=768, show_default=True)
@click.option("--sequence", default=160, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=8), default=14, show_default=True, help="Steps of each process."
)
@click.option("--window", default="16MiB", show_default=True, help="Size of the in-flight window.")
@dtype_option
@directory_option
@json_option
def main(
    *, depths: tuple[int, ...], hidden: int, sequence: int, dtype: str, json_file: str | None, **race: Any
) -> None:
    """Compare keep, keep again and offload for each number of layers."""
    rows, peaks = [], {}
    for depth in depths:
        shape = shape_of(layers=depth, hidden=hidden, sequence=sequence, dtype=dtype, dropout=0.1)
        ways = {"keep": "keep", CONTROL: "keep", "offload": "offload"}
        found = race_ways({name: (way, shape) for name, way in ways.items()}, **race)
        for row in found:
            peaks[row["name"], depth] = row["peak_bytes"]
            row["name"] += f", {depth} layers"
        rows += found
    print_table(rows, json_file)
    for way in ("keep", "offload"):
        growth = peaks[way, depths[-1]] / peaks[way, depths[0]]
        click.echo(f"{way}: {depths[-1]} layers need {growth:.2f} x the activation peak of {depths[0]}")


if __name__ == "__main__":
    main()
