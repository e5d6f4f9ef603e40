"""Does the activation peak grow with depth? Models of one width with more and more layers.

    python benchmarks/depth.py

For every depth keep, keep once more and offload train in processes of their own, single steps alternating.
With keep the peak grows with the number of layers; with offload it should stay where it is, at the speed of
keep. What the two lanes of keep differ by is noise.
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
    "--steps", type=click.IntRange(min=8), default=14, show_default=True, help="Of each at a depth."
)
@click.option("--window", default="16MiB", show_default=True, help="Bytes in flight.")
@dtype_option
@directory_option
@json_option
def main(
    *, depths: tuple[int, ...], hidden: int, sequence: int, dtype: str, json_file: str | None, **race: Any
) -> None:
    """Race keep, keep again and offload at every depth."""
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
