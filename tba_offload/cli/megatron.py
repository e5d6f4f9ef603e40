"""``tba-offload patch`` and ``launch``: scripts of Megatron-LM with offloading."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Print whether the patch can be added, and change no file.")
@click.option("--reverse", is_flag=True, help="Remove the patch.")
def patch(directory: Path, *, check: bool, reverse: bool) -> None:
    """Add the --tba- flags to the scripts of a Megatron-LM checkout.

    DIR is the root of the checkout. If the checkout is already patched, the command changes nothing. The
    command fails if there is no patch for the release of Megatron-LM, or if the checkout has other changes in
    the patched lines.
    """
    from tba_offload.megatron.patch import Checkout

    checkout = Checkout.at(directory)
    changes = checkout.unpatch(check=check) if reverse else checkout.patch(check=check)
    if reverse:
        done, would, nothing = "patch removed", "the patch can be removed", "not patched"
    else:
        done, would, nothing = "patched", "can be patched", "already patched"
    state = (would if check else done) if changes else nothing
    click.echo(f"{directory} ({checkout.release}): {state}")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--cpu", is_flag=True, help="Train on a CPU with gloo, to try the command without a GPU.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def launch(*, cpu: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run an unmodified training script of Megatron-LM with offloading, in one process.

    SCRIPT is a training script in a checkout of Megatron-LM, such as pretrain_gpt.py. ARGUMENTS are the
    arguments of the script, and may contain --tba- flags. To list the --tba- flags, pass --help after SCRIPT.
    For several processes, use: torchrun ... -m tba_offload.megatron.launch SCRIPT ARGUMENTS.
    """
    from tba_offload.megatron.launch import CPU, prepare, run

    run(prepare([*([CPU] if cpu else []), script, *arguments]))
