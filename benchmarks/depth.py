"""Does the activation peak grow with depth? Models of one width with more and more layers.

    python benchmarks/depth.py

For every depth keep, keep once more and offload train in processes of their own, single steps alternating.
With keep the peak grows with the number of layers; with offload it should stay where it is, at the speed of
keep. What the two lanes of keep differ by is noise.
"""

from __future__ import annotations

import click
from gpt_runner import CONTROL, SHAPE, dtype_option, lanes, print_table, report, settled_dtype, settled_hidden

WIDEST = 1408
WAYS = (("keep", "keep"), (CONTROL, "keep"), ("offload", "offload"))
"""Lanes, and what each does."""


@click.command()
@click.option("--depth", "depths", type=int, multiple=True, default=(6, 12, 24, 48), show_default=True)
@click.option("--hidden", type=int, default=None, help=f"Width.  [default: what fits, at most {WIDEST}]")
@click.option("--sequence", default=160, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=5), default=14, show_default=True, help="Steps of each at every depth."
)
@click.option("--window", default="16MiB", show_default=True, help="Bytes in flight.")
@dtype_option
@click.option("--directory", default=None, help="Where files go.  [default: a temporary directory]")
@click.option("--json", "json_file", default=None, help="Also write the figures to this file.")
def main(
    *,
    depths: tuple[int, ...],
    steps: int,
    batch_size: int,
    window: str,
    dtype: str,
    directory: str | None,
    json_file: str | None,
    hidden: int | None,
    sequence: int,
) -> None:
    """Race keep, keep again and offload at every depth."""
    rows = []
    model = SHAPE | {"dtype": settled_dtype(dtype), "dropout": 0.1, "sequence": sequence}
    deepest = model | {"layers": max(depths), "hidden": hidden}
    model["hidden"] = settled_hidden(most=WIDEST, processes=len(WAYS), batch_size=batch_size, **deepest)
    for depth in depths:
        entrants = {f"{name}, {depth} layers": (way, model | {"layers": depth}) for name, way in WAYS}
        results = lanes(entrants, steps=steps, batch_size=batch_size, window=window, directory=directory)
        rows += report(results, base=dict.fromkeys(entrants, f"keep, {depth} layers"))
    print_table(rows, json_file)
    peaks = {row["name"]: row["peak_bytes"] for row in rows}
    for way in ("keep", "offload"):
        growth = peaks[f"{way}, {depths[-1]} layers"] / peaks[f"{way}, {depths[0]} layers"]
        click.echo(f"{way}: {depths[-1]} layers need {growth:.2f} x the activation peak of {depths[0]}")


if __name__ == "__main__":
    main()
