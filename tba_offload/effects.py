"""Settings that are legal and do not do what they seem to: no layer obeys them, or no memory is saved.

What can never be right is an error, see :meth:`tba_offload.config.OffloadConfig.problems`. What may be meant,
as one policy file for models of several depths or one for several machines, is a warning, and stands here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tba_offload.errors import NoEffectWarning, NothingSavedWarning, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId


def saves_nothing(config: OffloadConfig) -> str | None:
    """Why offloading frees no memory of a model on the CPU; ``None`` if it does.

    Raises:
        StoreError: A directory does not answer.
    """
    from tba_offload.store.hanging import ask
    from tba_offload.store.options import directories_of
    from tba_offload.store.run_file import lies_in_memory

    remedy = "name a directory on a drive"
    if config.store.kind == "host":
        return f"kind: host moves activations from host memory to host memory; {remedy}, with kind: file"
    for directory in directories_of(config.store):
        if ask(partial(lies_in_memory, directory), directory, config.store.stall_seconds):
            return f"{directory} lies in host memory; {remedy}"
    if config.store.host_capacity is not None:
        return "host_capacity takes host memory for what the drives have no time for; remove it"
    return None


def warn_of_doubts(config: OffloadConfig, layers: Sequence[LayerId], *, on_cpu: bool) -> None:
    """Warns of everything that has no effect, each once.

    Args:
        config: A configuration without problems.
        layers: The layers of all ranks.
        on_cpu: Whether the model lies in host memory.
    """
    for doubt in config.doubts(layers):
        warn(doubt, NoEffectWarning)
    if on_cpu and config.states is not None and config.states.update != "device":
        idle = "the model is on the CPU, whose processor makes every update; remove it"
        message = str(config.source.error(("states", "update"), idle))
        warn(message, NoEffectWarning)
    if on_cpu and (why := saves_nothing(config)) is not None:
        message = f"the model is on the CPU, so that offloading saves less than it seems to: {why}"
        warn(message, NothingSavedWarning)
