"""Messages of a session during training: lines about plans and steps, and warnings.

Each warning is given once. Lines about plans and steps go to the logger ``tba_offload.session``, or to stderr
if the program has no logging handler.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tba_offload.errors import NoEffectWarning, NothingSavedWarning, warn, without_bars
from tba_offload.formatting import readable_size
from tba_offload.layers.graph import first_differentiable
from tba_offload.store.open import saves_nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId
    from tba_offload.report.log import StepRecord
    from tba_offload.session.session import Session

_MESSAGES = {
    "backward outside": "the step ended before backward. Gradients are correct, but "
    "the step's record excludes this backward. Put forward and backward into one `with session.step():`",
    "cache": "the model fills a key-value cache during training, which takes memory. Set use_cache=False",
    "left alone": "{} runs inside saved-tensor hooks of the program, torch.func, or inside a backward pass. "
    "Its placement has no effect. Instead of a checkpoint, use recompute-offload or pass use_reentrant=False",
    "all frozen": "the model runs with gradients enabled, but none of its parameters requires gradients, so "
    "its layers save no activations. Set requires_grad=True for the parameters to train",
    "no layer": "the model was trained, but no activation is offloaded or recomputed: {}. Close the session, "
    "and attach the layers that train: attach(model, config, layers=[...])",
    "no update": "backward set gradients {} times, but no optimizer updated the model's parameters. Call "
    "optimizer.step(). If a gradient scaler skipped the updates, ignore this warning. If the program updates "
    "copies of the parameters, put each training step into one `with session.step():`",
    "stale": "optimizer.step() was called {} times, but the optimizer {} updates none of the model's "
    "parameters. Create the optimizer from the parameters of this model. If the optimizer updates copies of "
    "the parameters, put each training step into one `with session.step():`",
    "full": "the store is full: {} of activations stayed in memory in step {}. Free space on the drives, or "
    "set store.capacity. By default, the store leaves a twentieth of each disk free, at least 1 GiB",
    "nothing left": "budget.device_bytes of {} leaves nothing for activations: other memory on the device "
    "takes {}. Offload optimizer states (states:) or frozen weights (weights:), or raise budget.device_bytes",
}
OTHER_RANKS = (
    "the planner chooses no layers to recompute, because several ranks train, and all of them must recompute "
    "the same layers. To recompute a layer on all ranks, set its placement to 'recompute'"
)

logger = logging.getLogger("tba_offload.session")


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def tell(line: str) -> None:
    """Log one line, or write the line to stderr if the program has no logging handler."""
    with without_bars():
        if any(logging.getLogger(name).handlers for name in (None, "tba_offload", logger.name)):
            logger.info("%s", line)
        else:
            sys.stderr.write(f"tba-offload: {line}\n")


class Notices:
    """Warnings of a session, each given once.

    Attributes:
        said: Keys of the warnings that were given.
    """

    def __init__(self) -> None:
        self.said: set[str] = set()
        self._unreached = 0  # steps in which layers ran and backward did not reach any of them
        self._strangers = 0  # updates by optimizers without a parameter of the model

    def warn_once(self, what: str, *figures: object, category: type[Warning] = UserWarning) -> None:
        """Give a warning, unless the session has already given the warning.

        Args:
            what: Key of the warning.
            figures: Values for the placeholders of the message or, for a key without a message, the text of
                the warning.
            category: Class of the warning.
        """
        if what not in self.said:
            self.said.add(what)
            warn(_MESSAGES.get(what, "{}").format(*figures), category)

    def no_layer_trained(self, session: Session, number: int) -> None:
        """Warn that a step trained the model but none of its attached layers.

        Args:
            session: The session of the step.
            number: Number of the step, from 1.
        """
        present = {module for model in session.modules for module in model.modules()}
        gone = [layer.id.name for layer in session.layers if layer.module not in present]
        if gone:
            cause = f"attached layers are no longer in the model ({', '.join(gone[:3])})"
        else:
            self._unreached += 1
            weights = (weight for layer in session.layers for weight in layer.module.parameters())
            # A GAN that is one model detaches its generator in some steps.
            if self._unreached < max(number, EARLY) and any(weight.requires_grad for weight in weights):
                return
            cause = "no backward pass reached an attached layer (frozen, detached, or run without gradients)"
        self.warn_once("no layer", cause, category=NoEffectWarning)

    def stranger_updated(self, optimizer: Optimizer) -> None:
        """Count updates by optimizers that have no parameters of the model. Warn at the third update."""
        self._strangers += 1
        if self._strangers == EARLY:
            self.warn_once("stale", EARLY, type(optimizer).__name__, category=NoEffectWarning)

    def all_frozen(self, session: Session, output: object) -> None:
        """Warn if all parameters of a model are frozen and its output does not require a gradient."""
        weights = (weight for module in session.modules for weight in module.parameters())
        if first_differentiable(output) is None and not any(weight.requires_grad for weight in weights):
            self.warn_once("all frozen", category=NoEffectWarning)


EARLY = 3
"""Number of steps after which a mistake in the training loop is reported."""

MOST_UNSEEN = 128
"""Number of backward passes without an update after which the step ends with a warning.

With gradient accumulation, a step may have tens of backward passes.
"""


def warn_after(session: Session, record: StepRecord) -> None:
    """Give the warnings that follow from the record of a step.

    Args:
        session: The session of the step.
        record: The record of the step.
    """
    notices, budget, number = session.notices, session.budget, record.step
    trace, stats = session.capture.trace, session.offloader.window.stats
    was_reached = trace.backward_ends or trace.in_backward or record.left_alone_scopes
    if record.gradient_bytes and not was_reached:
        notices.no_layer_trained(session, number)
    passes = len(trace.backward_ends)
    if record.skipped and not session.optimizers and (number >= EARLY or passes >= MOST_UNSEEN):
        notices.warn_once("no update", max(number, passes), category=NoEffectWarning)
    if stats.full:
        notices.warn_once("full", readable_size(stats.fallback_kept), number)
    if (share := budget.share) is not None and share.left <= 0:
        held = readable_size(share.base_bytes + share.gradient_bytes)
        notices.warn_once("nothing left", readable_size(share.device_bytes), held, category=RuntimeWarning)


def warn_of_doubts(config: OffloadConfig, layers: Sequence[LayerId], *, on_cpu: bool) -> None:
    """Warn about each setting without effect, or with less effect than expected.

    Args:
        config: A valid configuration.
        layers: The layers of all ranks.
        on_cpu: Whether the model is in host memory.
    """
    for doubt in config.doubts(layers):
        warn(doubt, NoEffectWarning)
    if on_cpu and (why := saves_nothing(config.store)) is not None:
        warn(f"the model is on the CPU, so offloading saves little or no memory: {why}", NothingSavedWarning)
