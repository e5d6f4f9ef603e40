"""``tba-offload estimate``: the cost of each placement, computed before any run."""

from __future__ import annotations

import re
from typing import Any

import click

from tba_offload.cli.shared import JSON, RATED, bandwidth_of, rates, size, with_host_memory

_COUNT = click.IntRange(min=1)
_UNITS = {"G": 1e9, "T": 1e12, "P": 1e15}


def _flops(_context: click.Context, _parameter: click.Parameter, text: str) -> float:
    found = re.fullmatch("([0-9]+(?:[.][0-9]+)?)([GTP])(/s)?", text)
    if found is None or not float(found[1]):
        raise click.BadParameter(f"{text!r} is not a number of FLOPs a second, such as 400T (units: G, T, P)")
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.option("--config", type=click.Path(exists=True), help="config.json of transformers, or its folder.")
@click.option("--layers", "num_hidden_layers", type=_COUNT, help="Layers of a Llama, without --config.")
@click.option("--hidden", "hidden_size", type=_COUNT, help="The width of that model.")
@click.option("--heads", "num_attention_heads", type=_COUNT, help="The number of its attention heads.")
@click.option("--vocab", "vocab_size", type=_COUNT, help="The size of its vocabulary.")
@click.option("--sequence", type=_COUNT, default=1024, show_default=True, help="Tokens of a sequence.")
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences of a micro-batch.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option("--lora", type=_COUNT, metavar="RANK", help="Rank of LoRA in all linear modules of the layers.")
@click.option("--base-bits", type=click.Choice(["4", "8"]), help="With --lora, bits of the frozen weights.")
@click.option("--flops", callback=_flops, required=True, help="FLOPs a second in training, such as 400T.")
@rates
@click.option(
    "--device-bytes",
    callback=size,
    metavar="SIZE",
    help="Memory of the device, such as 80GiB, for weights, gradients, Adam's two moments and activations.",
)
@click.option("--host-capacity", callback=size, metavar="SIZE", help="Host memory, filled before the drives.")
@RATED
@JSON
def estimate(*, host_capacity: int | None, **options: Any) -> None:
    """Compute the cost of each placement before any run.

    The placements are keep (activations stay in memory), offload (they are written to drives and read back),
    offload-remat (as offload, but backward computes the outputs of cheap operations again), recompute
    (backward runs each layer again) and recompute-offload (as recompute, and the inputs of layers are
    offloaded). With --device-bytes, the last row is the fastest plan that fits the device.

    For each placement, the output has the activation peak, the step time, the rate that drives need to write
    all bytes during the forward pass, the bytes written, and the life of the drives. The model runs steps on
    tensors without bytes. The model is a language model of transformers with one stack of layers. The bytes
    written are the most that a step can write: drives write fewer if backward still finds some in memory. The
    rates of host memory are measured on this machine. The last line gives the length of sequences from which
    on the drives carry recompute-offload without waiting.

    The kernels are those of this machine. On a CPU, dropout and attention with dropout save more than on a
    GPU.
    """
    bits = options.pop("base_bits")
    if bits is not None and options["lora"] is None:
        raise click.UsageError("--base-bits needs --lora: only frozen weights have 4 or 8 bits")
    bandwidth = bandwidth_of(options)
    if bandwidth is None:
        raise click.UsageError("give the rates of the drives: --write and --read, or --dir")
    if host_capacity is not None:
        bandwidth = with_host_memory(bandwidth, host_capacity)
    sizes = "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    if options["config"] is None and None in map(options.get, sizes):
        raise click.UsageError("give the model: --config, or --layers, --hidden, --heads and --vocab")
    from tba_offload.estimate import run_on_console

    run_on_console(bandwidth=bandwidth, base_bits=bits and int(bits), **options)
