"""``tba-offload patch`` and ``launch``: Megatron-LM's own scripts with offloading."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Change nothing; say whether it would work.")
@click.option("--reverse", is_flag=True, help="Take the patch out again.")
def patch(directory: Path, *, check: bool, reverse: bool) -> None:
    """Give the scripts of a Megatron-LM checkout the --tba- flags.

    DIR is its root. Patching twice changes nothing. A tree of a release that there is no patch for, or with
    uncommitted changes in the files to be patched, is refused and stays as it is.
    """
    from tba_offload.megatron.patch import Checkout

    checkout = Checkout.at(directory)
    changes = checkout.unpatch(check=check) if reverse else checkout.patch(check=check)
    if reverse:
        done, would, nothing = "patch taken out", "the patch can be taken out", "is not patched"
    else:
        done, would, nothing = "patched", "can be patched", "is patched already"
    state = (would if check else done) if changes else nothing
    click.echo(f"{directory} ({checkout.release}): {state}")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--cpu", is_flag=True, help="Train on the CPU, with gloo; for trying things out.")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def launch(*, cpu: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run an untouched Megatron-LM training script with offloading.

    SCRIPT is the pretrain_gpt.py of a checkout; among its ARGUMENTS are the flags that begin with --tba-, see
    its own --help. For several processes: torchrun ... -m tba_offload.megatron.launch SCRIPT ARGUMENTS.
    """
    from tba_offload.megatron.launch import CPU, launch

    launch([*([CPU] if cpu else []), script, *arguments])
