"""``tba-offload estimate``: the cost of each placement, computed before any run."""

from __future__ import annotations

import re
from typing import Any

import click

from tba_offload.cli.shared import COUNT, JSON, RATED, bandwidth_of, rates, size, with_host_memory

_DTYPES = click.Choice(["bf16", "fp16", "fp32"])
_UNITS = {"G": 1e9, "T": 1e12, "P": 1e15}


def _flops(text: str) -> float:
    found = re.fullmatch("([0-9]+(?:[.][0-9]+)?)([GTP])(/s)?", text)
    if found is None or not float(found[1]):
        why = f"{text!r} must be a number of FLOPs per second with the unit G, T or P, such as 400T"
        raise click.BadParameter(why)
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.option("--config", type=click.Path(exists=True), help="Path of the model's config.json.")
@click.option("--layers", "num_hidden_layers", type=COUNT, help="Number of layers of a Llama model.")
@click.option("--hidden", "hidden_size", type=COUNT, help="Hidden size of the Llama model.")
@click.option("--heads", "num_attention_heads", type=COUNT, help="Number of heads of each Llama layer.")
@click.option("--vocab", "vocab_size", type=COUNT, help="Vocabulary size of the Llama model.")
@click.option("--sequence", type=COUNT, default=1024, show_default=True, help="Sequence length in tokens.")
@click.option("--batch", type=COUNT, default=1, show_default=True, help="Sequences per micro-batch.")
@click.option("--dtype", type=_DTYPES, default="bf16", show_default=True, help="Data type of the model.")
@click.option("--lora", type=COUNT, metavar="RANK", help="Train only LoRA matrices of this rank.")
@click.option("--base-bits", type=click.Choice(["4", "8"]), help="Bits per frozen weight. Needs --lora.")
@click.option("--flops", type=_flops, metavar="FLOPS", required=True, help="FLOP/s in training, e.g. 400T.")
@rates
@click.option("--device-bytes", type=size, help="Memory of the device, such as 80GiB.")
@click.option("--host-capacity", type=size, help="Host memory for activations, used before the drives.")
@RATED
@JSON
def estimate(*, host_capacity: int | None, **options: Any) -> None:
    """Compute the cost of each placement before any run.

    The placements are 'keep', 'offload', 'offload-remat', 'recompute' and 'recompute-offload'. With 'keep',
    activations stay in memory. With 'offload', activations are written to drives and read back.
    'offload-remat' is like 'offload', but backward computes the outputs of cheap operations again. With
    'recompute', backward runs each layer again. 'recompute-offload' is like 'recompute', but the inputs of
    layers are offloaded. With --device-bytes, the last row of the table is the fastest plan with which the
    activations, weights, gradients and Adam's two moments fit the device.

    For each placement, the output has the activation peak, the step time and the largest number of bytes
    that a step writes. With --rated, the output also has the life of the drives in years. The column 'Drives
    need' has the write rate at which drives do not delay the forward pass. The last line names the
    sequence length from which on 'recompute-offload' does not wait for drives.

    The model is a language model of the package transformers, with one stack of layers. For a Llama model,
    pass --layers, --hidden, --heads and --vocab instead of --config. --flops is the number of FLOPs per
    second that the device reaches in training. With --host-capacity, the rates of host memory are measured on
    this machine. The estimate assumes the kernels of this machine. On a CPU, dropout saves more bytes than on
    a GPU.
    """
    bits = options.pop("base_bits")
    if bits is not None and options["lora"] is None:
        raise click.UsageError("--base-bits needs --lora, because trained weights cannot have 4 or 8 bits")
    bandwidth = bandwidth_of(options)
    if bandwidth is None:
        raise click.UsageError("the drive rates are unknown. Pass --write and --read, or pass --dir")
    if host_capacity is not None:
        bandwidth = with_host_memory(bandwidth, host_capacity)
    sizes = "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    if options["config"] is None and None in map(options.get, sizes):
        raise click.UsageError("no model given. Pass --config, or --layers, --hidden, --heads and --vocab")
    from tba_offload.estimate import run_on_console

    run_on_console(bandwidth=bandwidth, base_bits=bits and int(bits), **options)
