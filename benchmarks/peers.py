"""Compare tba-offload with other methods that save activation memory, on a small GPT.

    python benchmarks/peers.py

Each method trains in its own process, and the processes alternate step by step. The peak is the highest
number of the allocator's live bytes during forward and backward, minus the live bytes before. The time is the
time of forward, backward and optimizer. Each ratio is the median of the ratios of all rounds, with quartiles.
The ratio of ``keep again`` to ``keep`` is noise.

Selective checkpoints save the results of all matrix products of a layer, or of every second product, and
recompute all other tensors. ``gpu.py`` compares the offloading hooks of torchtune, which need an accelerator.
"""

from __future__ import annotations

from typing import Any

import click
from lanes import CONTROL, WAYS, directory_option, dtype_option, json_option, print_table, race_ways, shape_of


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--layers", default=12, show_default=True)
@click.option("--hidden", default=768, show_default=True)
@click.option("--sequence", default=256, show_default=True)
@click.option("--batch-size", default=2, show_default=True)
@click.option(
    "--steps", type=click.IntRange(min=8), default=14, show_default=True, help="Steps of each method."
)
@click.option("--window", default="10MiB", show_default=True, help="In-flight window of tba-offload.")
@dtype_option
@directory_option
@json_option
def main(*, layers: int, hidden: int, sequence: int, dtype: str, json_file: str | None, **race: Any) -> None:
    """Compare keep, keep again, checkpoints, torch.save hooks, save_on_cpu and offload."""
    # Without dropout, because torch.utils.checkpoint does not restore the random states of Megatron's layers.
    shape = shape_of(layers=layers, hidden=hidden, sequence=sequence, dtype=dtype)
    lanes = {CONTROL: ("keep", shape), **{way: (way, shape) for way in WAYS}}
    print_table(race_ways(lanes, **race), json_file)


if __name__ == "__main__":
    main()
