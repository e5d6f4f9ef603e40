"""Settings that are legal and do not do what they seem to: no layer obeys them, or no memory is saved.

What can never be right is an error, see :meth:`tba_offload.config.OffloadConfig.problems`. What may be meant,
as one policy file for models of several depths or one for several machines, is a warning, and stands here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tba_offload.config import format_size
from tba_offload.config.policy import Placement
from tba_offload.errors import NoEffectWarning, NothingSavedWarning, warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId


def doubts(config: OffloadConfig, layers: Sequence[LayerId]) -> list[str]:
    """Return what has no effect on these layers, or less than it seems to.

    Args:
        config: A configuration without problems.
        layers: The layers of all ranks.
    """
    found = config.policy.doubts(layers)
    if (why := _why_no_budget(config, config.policy.placements(layers))) is not None:
        found.append(str(config.error_at(("budget", "activation_bytes"), why)))
    is_shared = config.states is not None and config.states.default == "auto"
    is_obeyed = is_shared or not _obeys_no_budget(config.policy.placements(layers))
    if config.budget.device_bytes is not None and not is_obeyed:
        found.append(str(config.error_at(("budget", "device_bytes"), _NOTHING_KEEPS_TO_IT)))
    is_limited = config.store.write_bytes_per_day is not None
    if is_limited and Placement.AUTO not in config.policy.placements(layers):
        why = "it limits nothing: no layer is placed auto; place layers auto, or remove it"
        found.append(str(config.error_at(("store", "write_bytes_per_day"), why)))
    return found


_NOTHING_KEEPS_TO_IT = (
    "nothing keeps to it: every layer is placed keep or recompute; place layers auto, or offload, or remove "
    "it"
)


def _obeys_no_budget(placements: set[Placement]) -> bool:
    """Whether no layer changes for a budget."""
    is_auto = Placement.AUTO in placements
    return not (is_auto or any(placement.offloads for placement in placements))


def _why_no_budget(config: OffloadConfig, placements: set[Placement]) -> str | None:
    """Why the budget of activations limits nothing; ``None`` if it does, or there is none."""
    budget, window = config.budget.limits
    if budget is None or Placement.AUTO in placements:
        return None
    if _obeys_no_budget(placements):
        return _NOTHING_KEEPS_TO_IT
    if window is None or budget < window or config.on_slow == "keep":
        return None
    return (
        "it limits nothing: no layer is placed auto, and for the others it is a limit of the bytes in "
        f"flight, of which in_flight_bytes allows {format_size(window)} at most; place layers auto, or "
        "remove it"
    )


def saves_nothing(config: OffloadConfig) -> str | None:
    """Why offloading frees no memory of a model on the CPU; ``None`` if it does.

    Raises:
        StoreError: A directory does not answer.
    """
    from tba_offload.store.hanging import ask
    from tba_offload.store.run_file import lies_in_memory

    remedy = "name a directory on a drive"
    if config.store.kind == "host":
        return f"kind: host moves activations from host memory to host memory; {remedy}, with kind: file"
    for directory in config.store.options().directories:
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
    for doubt in doubts(config, layers):
        warn(doubt, NoEffectWarning)
    if on_cpu and config.states is not None and config.states.update != "device":
        idle = "the model is on the CPU, whose processor makes every update; remove it"
        message = str(config.error_at(("states", "update"), idle))
        warn(message, NoEffectWarning)
    if on_cpu and (why := saves_nothing(config)) is not None:
        message = f"the model is on the CPU, so that offloading saves less than it seems to: {why}"
        warn(message, NothingSavedWarning)
