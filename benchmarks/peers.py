"""The same GPT under the ways in which people save activation memory today, and under ours.

    python benchmarks/peers.py

Each way trains in a process of its own; single steps alternate. Peak: live bytes of the allocator during
forward and backward minus those before. Time: forward, backward and optimizer. Ratios are medians over the
rounds of the ratio within a round, with quartiles; that of a second keep to keep is noise.

Selective checkpoints save the results of matrix products of a layer, all or every second one, and recompute
the rest. The offloading hooks of torchtune and TRL need an accelerator; ``gpu.py`` races torchtune's.
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
@click.option("--steps", type=click.IntRange(min=8), default=14, show_default=True, help="Of each way.")
@click.option("--window", default="10MiB", show_default=True, help="Bytes in flight of ours.")
@dtype_option
@directory_option
@json_option
def main(*, layers: int, hidden: int, sequence: int, dtype: str, json_file: str | None, **race: Any) -> None:
    """Race keep, keep again, checkpoints, torch.save hooks, save_on_cpu and offload."""
    # Without dropout, whose random states plain torch.utils.checkpoint does not know in Megatron's layers.
    shape = shape_of(layers=layers, hidden=hidden, sequence=sequence, dtype=dtype)
    lanes = {CONTROL: ("keep", shape), **{way: (way, shape) for way in WAYS}}
    print_table(race_ways(lanes, **race), json_file)


if __name__ == "__main__":
    main()
