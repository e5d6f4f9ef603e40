"""What a session tells while it trains: new plans, steps if asked, and warnings, each of them once.

Plans and steps go to the logger ``tba_offload.session``. A program that sets logging up decides what becomes
of them. Where none has, they go to stderr, a line each.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tba_offload.config import format_size
from tba_offload.errors import NoEffectWarning, NothingSavedWarning, warn
from tba_offload.formatting import readable_size
from tba_offload.placements import Placement
from tba_offload.store.open import saves_nothing
from tba_offload.torch_private import is_checkpoint_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId
    from tba_offload.report.log import StepRecord
    from tba_offload.session.session import Session

_MESSAGES = {
    "backward outside": "backward runs outside of the step that its forward was in: gradients are right, the "
    "figures of that step lack it. put both into one `with session.step():`",
    "cache": "the model fills a cache of keys and values while it trains, so that those of all layers stay "
    "in memory: switch it off (use_cache=False, to the model or in its config)",
    "checkpointing": "gradient checkpointing is switched on in {} of the {} layers of the model: backward "
    "computes them again whatever their placement. switch it off (gradient_checkpointing=False or, newer, "
    "activation_checkpointing=False in the arguments of a Hugging Face trainer), and to have layers "
    "recomputed place them recompute-offload",
    "left alone": "{} runs inside saved-tensor hooks or a transform of other code (a checkpoint, "
    "save_on_cpu, torch.func), or only within a backward pass (a loss that caches gradients), so it is "
    "neither offloaded nor recomputed: switch that off, or place the layer keep",
    "no layer": "nothing is offloaded or recomputed: {}, though the model was trained. close the session, "
    "and attach the layers that train: attach(model, config, layers=[...])",
    "no update": "gradients go away in every step, and no optimizer of the model's parameters was seen to "
    "update them: such steps count as skipped, and nothing is planned. put all micro-batches of a step and "
    "its update into one `with session.step():`",
    "full": "the store is full: {} of activations stayed in memory in step {}; make room where "
    "store.directories are, or set store.capacity: else a twentieth of a disk, at least 1 GiB, stays free",
    "nothing left": "budget.device_bytes of {} leaves nothing for activations: {} lie there beside them; "
    "offload the states of optimizers (states:) or frozen weights (weights:), or raise budget.device_bytes",
    "window": "offloading frees little here: the layers save {} in a step, and budget.in_flight_bytes lets "
    "{} of it stay in memory at a time; with in_flight_bytes: {} most of it leaves memory",
}
OTHER_RANKS = (
    "the planner recomputes no layer, because other ranks may run the same layers and would have to do the "
    "same; place layers recompute to have it so on all ranks"
)

logger = logging.getLogger("tba_offload.session")


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def tell(line: str) -> None:
    """Say one line."""
    if any(logging.getLogger(name).handlers for name in (None, "tba_offload", logger.name)):
        logger.info("%s", line)
    else:
        sys.stderr.write(f"tba-offload: {line}\n")


class Notices:
    """What a session has to say once.

    Attributes:
        said: What was said.
    """

    def __init__(self) -> None:
        self.said: set[str] = set()
        self._unreached = 0  # steps in which layers ran, and backward came to none

    def warn_once(self, what: str, *figures: object, category: type[Warning] = UserWarning) -> None:
        """Warn of one cause.

        Args:
            what: The cause, of which there is one warning only.
            figures: What its message is filled in with; of a cause without a message, the message.
            category: The class of the warning.
        """
        if what not in self.said:
            self.said.add(what)
            warn(_MESSAGES.get(what, "{}").format(*figures), category)

    def no_layer_trained(self, session: Session, number: int) -> None:
        """Warn that a step has trained the model and none of its layers, where that is no whim of the model.

        Args:
            session: Whose step.
            number: Of the step, from 1.
        """
        present = {module for model in session.modules for module in model.modules()}
        gone = [layer.id.name for layer in session.layers if layer.module not in present]
        if gone:
            cause = f"attached layers are no longer in the model ({', '.join(gone[:3])})"
        else:
            self._unreached += 1
            weights = (weight for layer in session.layers for weight in layer.module.parameters())
            # A GAN in one model has steps whose generator is detached, and others.
            if self._unreached < max(number, 3) and any(weight.requires_grad for weight in weights):
                return
            cause = "no backward pass came to an attached layer (frozen, detached, or run without gradients)"
        self.warn_once("no layer", cause, category=NoEffectWarning)

    def checkpointing(self, session: Session) -> None:
        """Warn that a layer that is offloaded or recomputed is checkpointed by its own framework."""
        placed = zip(session.layers, session.plan.placements, strict=True)
        others = [layer.module for layer, placement in placed if placement is not Placement.KEEP]
        if "checkpointing" not in self.said and (count := sum(map(is_checkpointed, others))):
            self.warn_once("checkpointing", count, len(session.layers))


_LOOKED_AT = 3
"""Steps in which it is looked whether the window is too wide: later ones save as much."""

MOST_UNSEEN = 128
"""Steps, or backward passes of one step, after which an optimizer is missed if none was seen."""


def warn_after(session: Session, record: StepRecord) -> None:
    """Warn of what a step that has ended well has shown.

    Args:
        session: Whose step.
        record: Of the step.
    """
    notices, budget, number = session.notices, session.budget, record.step
    trace, stats = session.capture.trace, session.offloader.window.stats
    was_reached = trace.backward_ends or trace.in_backward or record.left_alone_scopes
    if record.gradient_bytes and not was_reached:
        notices.no_layer_trained(session, number)
    if record.skipped and not session.optimizers and max(number, len(trace.backward_ends)) >= MOST_UNSEEN:
        notices.warn_once("no update", category=NoEffectWarning)
    if stats.full:
        notices.warn_once("full", readable_size(stats.fallback_kept), number)
    if (share := budget.share) is not None and share.left <= 0:
        held = readable_size(share.base_bytes + share.gradient_bytes)
        notices.warn_once("nothing left", readable_size(share.device_bytes), held, category=RuntimeWarning)
    if number > _LOOKED_AT:
        return
    window, saved = budget.limits.window, sum(activation.nbytes for activation in trace.activations)
    is_offload = Placement.OFFLOAD in session.plan.placements and not session.planning.chosen
    if is_offload and window is not None and window > saved / 2 > 0:
        unit = 1 << 20 if saved >= 8 << 20 else 1 << 10
        eighth = format_size(max(saved // 8 // unit, 1) * unit)  # some of it moves while some is in use
        sizes = readable_size(saved), readable_size(window), eighth
        notices.warn_once("window", *sizes, category=NothingSavedWarning)


def warn_of_doubts(config: OffloadConfig, layers: Sequence[LayerId], *, on_cpu: bool) -> None:
    """Warn of each setting that has no effect, or less than it seems to.

    Args:
        config: A configuration without problems.
        layers: The layers of all ranks.
        on_cpu: Whether the model lies in host memory.
    """
    for doubt in config.doubts(layers):
        warn(doubt, NoEffectWarning)
    if on_cpu and config.states is not None and config.states.update != "device":
        idle = "has no effect: the model is on the CPU, whose processor makes every update. Remove it"
        warn(str(config.source.error(("states", "update"), idle)), NoEffectWarning)
    if on_cpu and (why := saves_nothing(config.store)) is not None:
        warn(f"the model is on the CPU, so offloading saves less than it seems: {why}", NothingSavedWarning)


def is_checkpointed(layer: nn.Module) -> bool:
    """Return True if the layer's own framework has its forward run again in backward.

    Layers of Hugging Face models say so in an attribute; PyTorch wraps those that are recomputed.
    """
    return is_checkpoint_wrapper(layer) or bool(getattr(layer, "gradient_checkpointing", False))
