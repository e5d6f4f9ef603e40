"""The same GPT under the ways in which people save activation memory today, and under ours.

    python benchmarks/peers.py

Each way trains in a process of its own; single steps alternate. Peak: live bytes of the allocator during
forward and backward minus those before. Time: forward, backward and optimizer. Ratios are medians over the
rounds of the ratio within a round, with quartiles; that of a second keep to keep is noise.

Selective checkpoints save the results of matrix products of a layer, all or every second one, and recompute
the rest. The offloading hooks of torchtune and TRL do not run without an accelerator and are missing here;
``gpu.py`` races torchtune's.
"""

from __future__ import annotations

import click
from gpt_runner import (
    CONTROL,
    SHAPE,
    WAYS,
    dtype_option,
    lanes,
    print_table,
    report,
    settled_dtype,
    settled_hidden,
)

WIDEST = 1024


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", type=int, default=None, help=f"Width.  [default: what fits, at most {WIDEST}]")
@click.option("--sequence", default=256, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=5), default=14, show_default=True, help="Steps of each way.")
@click.option("--window", default="10MiB", show_default=True, help="Bytes in flight of ours.")
@dtype_option
@click.option("--directory", default=None, help="Where files go.  [default: a temporary directory]")
@click.option("--json", "json_file", default=None, help="Also write the figures to this file.")
def main(
    *,
    steps: int,
    window: str,
    dtype: str,
    directory: str | None,
    json_file: str | None,
    batch_size: int,
    hidden: int | None,
    **shape: int,
) -> None:
    """Race keep, keep again, checkpoints, torch.save hooks, save_on_cpu and offload."""
    model = SHAPE | shape | {"dtype": settled_dtype(dtype), "hidden": hidden}
    model["hidden"] = settled_hidden(most=WIDEST, processes=len(WAYS) + 1, batch_size=batch_size, **model)
    entrants = {CONTROL: ("keep", model), **{way: (way, model) for way in WAYS}}
    results = lanes(entrants, steps=steps, batch_size=batch_size, window=window, directory=directory)
    print_table(report(results, base=dict.fromkeys(entrants, "keep")), json_file)


if __name__ == "__main__":
    main()
