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
        raise click.BadParameter(
            f"{text!r} must be a number of FLOPs per second with the unit G, T or P, such as 400T"
        )
    return float(found[1]) * _UNITS[found[2]]


@click.command()
@click.option(
    "--config",
    type=click.Path(exists=True),
    help="Model to estimate: the path of its config.json, or of the directory with this file.",
)
@click.option(
    "--layers",
    "num_hidden_layers",
    type=_COUNT,
    help="Number of layers of a Llama model. To estimate a Llama model without --config, pass --layers, "
    "--hidden, --heads and --vocab.",
)
@click.option("--hidden", "hidden_size", type=_COUNT, help="Hidden size of the Llama model.")
@click.option("--heads", "num_attention_heads", type=_COUNT, help="Attention heads of each Llama layer.")
@click.option("--vocab", "vocab_size", type=_COUNT, help="Vocabulary size of the Llama model.")
@click.option("--sequence", type=_COUNT, default=1024, show_default=True, help="Sequence length in tokens.")
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Sequences in each micro-batch.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--lora",
    type=_COUNT,
    metavar="RANK",
    help="Freeze the weights of the model, and add LoRA adapters of this rank to its layers.",
)
@click.option("--base-bits", type=click.Choice(["4", "8"]), help="Bits of each frozen weight. Needs --lora.")
@click.option(
    "--flops",
    callback=_flops,
    required=True,
    help="FLOPs per second that the device reaches in training, such as 400T.",
)
@rates
@click.option(
    "--device-bytes",
    callback=size,
    metavar="SIZE",
    help="Memory of the device, such as 80GiB. It must hold weights, gradients, Adam's two moments and "
    "activations.",
)
@click.option(
    "--host-capacity",
    callback=size,
    metavar="SIZE",
    help="Offload to this much host memory first, and to drives only when it is full.",
)
@RATED
@JSON
def estimate(*, host_capacity: int | None, **options: Any) -> None:
    """Compute the cost of each placement before any run.

    The placements are 'keep', 'offload', 'offload-remat', 'recompute' and 'recompute-offload'. With 'keep',
    activations stay in memory. With 'offload', activations are written to drives and read back.
    'offload-remat' is like 'offload', but backward computes the outputs of cheap operations again. With
    'recompute', backward runs each layer again. 'recompute-offload' is like 'recompute', but the inputs of
    layers are offloaded. With --device-bytes, the last row of the table is the fastest plan that fits the
    device.

    For each placement, the output has the activation peak, the step time, the bytes written and the life of
    the drives. The column 'Drives need' has the rate that drives need to write all bytes of a step during
    forward. A step writes fewer bytes if backward still finds some activations in memory. The last line names
    the shortest sequence length at which 'recompute-offload' does not wait for drives.

    The model is a language model of the package transformers, with one stack of layers. The model runs on
    tensors without data. The rates of host memory are measured on this machine. The estimate uses the kernels
    of this machine. On a CPU, dropout and attention with dropout save more bytes than on a GPU.
    """
    bits = options.pop("base_bits")
    if bits is not None and options["lora"] is None:
        raise click.UsageError(
            "--base-bits needs --lora, which freezes the weights. Only frozen weights can have 4 or 8 bits"
        )
    bandwidth = bandwidth_of(options)
    if bandwidth is None:
        raise click.UsageError(
            "the rates of the drives are unknown. Pass --write and --read, or pass --dir to measure a drive"
        )
    if host_capacity is not None:
        bandwidth = with_host_memory(bandwidth, host_capacity)
    sizes = "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    if options["config"] is None and None in map(options.get, sizes):
        raise click.UsageError(
            "the model is missing. Pass --config, or pass --layers, --hidden, --heads and --vocab"
        )
    from tba_offload.estimate import run_on_console

    run_on_console(bandwidth=bandwidth, base_bits=bits and int(bits), **options)
