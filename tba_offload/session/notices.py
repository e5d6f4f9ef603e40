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
from tba_offload.store.options import saves_nothing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId
    from tba_offload.layers.find import Layer
    from tba_offload.planner.model import DeviceShare
    from tba_offload.report.log import StepRecord
    from tba_offload.session.session import Session

_OUTSIDE_STEP = (
    "a layer trains outside of session.step(): its activations stay in memory; "
    "put forward and backward into `with session.step():`"
)
_BACKWARD_OUTSIDE = (
    "backward runs outside of the step that its forward was in: gradients are right, but the figures "
    "of that step lack it; put forward and backward into one `with session.step():`"
)
_CACHE = (
    "the model fills a cache of keys and values while it trains, so that those of all layers stay in memory "
    "until its output is dropped: switch it off (use_cache=False, to the model or in its config)"
)
_CHECKPOINTING = (
    "gradient checkpointing is switched on in {} of the {} layers of the model: backward computes them again "
    "whatever their placement, and at most their inputs are offloaded. switch it off to have all their "
    "activations offloaded instead: gradient_checkpointing=False among the arguments of a Hugging Face "
    "trainer (newer: activation_checkpointing=False; TRL's default is True). to recompute layers and offload "
    "their inputs, place them recompute-offload"
)
_OVERLAP = (
    "steps of two attached models are open at once: the activation peak of neither can "
    "be told and is left out of their records"
)
_NO_LAYER_RAN = (
    "no attached layer has recorded a graph in its forward, though the model was trained: nothing is "
    "offloaded or recomputed. reversible models run their layers without gradients; otherwise name the "
    "layers that train: attach(model, config, layers=[...])"
)
_NO_BACKWARD = (
    "the model was trained, and no backward pass came to an attached layer: nothing is offloaded or "
    "recomputed, and no step is recorded. the layers are frozen, or what they return is detached: attach "
    "the layers that train, attach(model, config, layers=[...]), or do without"
)
_NO_UPDATE = (
    "gradients go away in every step, and no optimizer of the model's parameters was seen to update them: "
    "each micro-batch counts as a step that was skipped, and nothing is planned. an optimizer that updates "
    "copies of the parameters is not noticed: put all micro-batches of a step and its update into one "
    "`with session.step():`"
)
_OTHER_RANKS = (
    "the planner recomputes no layer, because other ranks may run the same layers and would have to do the "
    "same; place layers recompute to have it so on all ranks"
)

_OTHERS = "other things (on a CPU all else of the process)"

logger = logging.getLogger("tba_offload.session")


class _UntilConfigured(logging.Handler):
    """Writes to stderr as long as nothing else would handle the record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if not any(logging.getLogger(name).handlers for name in (None, "tba_offload")):
            sys.stderr.write(f"tba-offload: {self.format(record)}\n")


logger.addHandler(_UntilConfigured(logging.INFO))
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def tell(line: str) -> None:
    """Say one line."""
    logger.info("%s", line)


class Notices:
    """What a session has to say once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._unreached = 0  # steps in which layers ran, and backward came to none

    def said(self, what: str) -> bool:
        """Whether that was said."""
        return what in self._said

    def warn_once(self, what: str, message: str, category: type[Warning] = UserWarning) -> None:
        """Warn of something.

        Args:
            what: Stands for the warning: of the same there is one only.
            message: What it says.
            category: Its class.
        """
        if what not in self._said:
            self._said.add(what)
            warn(message, category)

    def tell_once(self, line: str) -> None:
        """Say one line, by the logger."""
        if line not in self._said:
            self._said.add(line)
            tell(line)

    def outside_step(self) -> None:
        """Record that a layer trains where no step is open."""
        self.warn_once("outside", _OUTSIDE_STEP)

    def backward_outside(self) -> None:
        """Backward comes to a layer when its step is over."""
        self.warn_once("backward outside", _BACKWARD_OUTSIDE)

    def no_layer_trained(self, session: Session, number: int) -> None:
        """Warn that a step has trained the model and none of its layers, where that is no whim of the model.

        Args:
            session: Whose step.
            number: Of the step, from 1.
        """
        if self.said("no layer"):
            return
        present = {module for model in session.modules for module in model.modules()}
        gone = [layer.id.name for layer in session.layers if layer.module not in present]
        if gone:
            which = gone[0] if len(gone) == 1 else f"{gone[0]} and {len(gone) - 1} more"
            self.warn_once(
                "no layer",
                f"attached layers are no longer in the model ({which}), and none that is has run: nothing "
                "is offloaded or recomputed. close the session, and attach the model with its new layers",
                NoEffectWarning,
            )
        elif session.capture.trace.scopes:
            self._unreached += 1
            weights = (weight for layer in session.layers for weight in layer.module.parameters())
            is_frozen = not any(weight.requires_grad for weight in weights)
            # A GAN in one model has steps whose generator is detached, and others.
            if is_frozen or self._unreached >= max(number, 3):
                self.warn_once("no layer", _NO_BACKWARD, NoEffectWarning)
        elif number == 1:
            self.warn_once("no layer", _NO_LAYER_RAN, NoEffectWarning)

    def no_update(self) -> None:
        """Step that were found end without an update."""
        self.warn_once("no update", _NO_UPDATE, NoEffectWarning)

    def checkpointing(self, session: Session) -> None:
        """Warn that a layer that is offloaded or recomputed is checkpointed by its own framework."""
        placed = zip(session.layers, session.plan.placements, strict=True)
        others = [layer.module for layer, placement in placed if placement is not Placement.KEEP]
        if not self.said("checkpointing") and (count := sum(map(is_checkpointed, others))):
            self.warn_once("checkpointing", _CHECKPOINTING.format(count, len(session.layers)))

    def cache(self) -> None:
        """Warn that keys and values of all layers stay in memory."""
        self.warn_once("cache", _CACHE)

    def overlap(self) -> None:
        """Another attached model trains on the same device at the same time."""
        self.warn_once("overlap", _OVERLAP)

    def other_ranks(self) -> None:
        """Record that the planner cannot decide for other ranks."""
        self.tell_once(_OTHER_RANKS)

    def left_alone(self, layer: Layer) -> None:
        """Record that a layer runs inside hooks of others, where neither ours nor a checkpoint's can be."""
        self.warn_once(
            "left alone",
            f"{layer.id} runs inside saved-tensor hooks or a "
            "transform of other code (a checkpoint, save_on_cpu, torch.func), so it is neither "
            "offloaded nor recomputed; switch that off, or place the layer keep. the run log counts "
            "left_alone_scopes",
        )

    def runs_in_backward(self, layer: Layer) -> None:
        """Record that a layer runs first in a backward pass, before which no step has opened."""
        self.warn_once(
            "runs in backward",
            f"{layer.id} runs forward with a graph only within a backward pass, as in losses that cache "
            "gradients (sentence-transformers' CachedMultipleNegativesRankingLoss): it is neither offloaded "
            "nor recomputed, and no step is recorded. such a loss bounds activations by the size of its "
            "mini-batches; to have them offloaded take the one without a cache",
        )

    def full(self, nbytes: int, step: int, beyond: int) -> None:
        """Record that the store was full.

        Args:
            nbytes: Bytes that stayed in memory for that.
            step: In which step.
            beyond: Bytes by which this went over the budget.
        """
        over = f", {readable_size(beyond)} beyond the activation budget" if beyond > 0 else ""
        self.warn_once(
            "full",
            f"the store is full: {readable_size(nbytes)} of activations stayed in memory in step "
            f"{step}{over}; make room where store.directories are, or raise "
            "store.capacity. the run log counts fallback_kept_bytes",
        )

    def nothing_left(self, device: DeviceShare, static: Mapping[str, int]) -> None:
        """Record that what lies on the device beside activations takes all that may lie there.

        Args:
            device: What lies there.
            static: Bytes by what holds them.
        """
        rest = device.base_bytes - sum(nbytes for name, nbytes in static.items() if name != "gradients")
        gradients = max(device.gradient_bytes, static["gradients"])
        known = {**static, "gradients": gradients, _OTHERS: rest}
        sizes = {
            name.replace("_", " "): readable_size(nbytes) for name, nbytes in known.items() if nbytes > 0
        }
        held = ", ".join(f"{size} {name}" for name, size in sizes.items())
        self.warn_once(
            "nothing left",
            f"budget.device_bytes of {readable_size(device.device_bytes)} leaves nothing for activations: "
            f"{held} lie there in a step; offload the states of optimizers (states:) or frozen weights "
            "(weights: {frozen: offload}), train fewer parameters, or raise budget.device_bytes. smaller "
            "micro-batches do not help here",
            RuntimeWarning,
        )


_LOOKED_AT = 3
"""Steps in which it is looked whether the window is too wide: later ones save as much."""

_LEAST_STATES = 32 << 10
"""Bytes of states of which an eighth, the sub-groups that are advised, is as much as a sub-group may be."""


_SKIPPED = 17
"""Steps without an update after which an optimizer is missed: a gradient scaler that begins at 2**16 has come
down to 1 after 16."""


def warn_after(session: Session, record: StepRecord) -> None:
    """Warn of what a step that has ended well has shown.

    Args:
        session: Whose step.
        record: Of the step.
    """
    notices, budget, plan, number = session.notices, session.budget, session.plan, record.step
    trace, stats = session.capture.trace, session.offloader.stats
    if record.gradient_bytes and not (trace.backward_ends or record.left_alone_scopes):
        notices.no_layer_trained(session, number)
    if record.skipped and number == _SKIPPED and not session.optimizers:
        notices.no_update()
    if stats.full:
        allowed = budget.of_activations
        beyond = 0 if allowed is None else stats.own_peak + trace.kept_bytes - allowed
        notices.full(stats.fallback_kept, number, beyond)
    window, saved = budget.limits.window, sum(activation.nbytes for activation in trace.activations)
    is_offload = Placement.OFFLOAD in plan.placements and not session.planning.chosen
    if number <= _LOOKED_AT and is_offload and window is not None and saved and window > saved / 2:
        notices.warn_once(
            "window",
            f"offloading frees little here: the layers save {readable_size(saved)} in a step, and "
            f"budget.in_flight_bytes lets {readable_size(window)} of it stay in memory at a time; with "
            f"in_flight_bytes: {format_size(_eighth(saved))} most of it leaves memory",
            NothingSavedWarning,
        )
    records = [states.records[-1] for states in session.states if states.records]
    if number != _LOOKED_AT or any(each.staying for each in records):
        return
    states, slots = sum(each.states_bytes for each in records), sum(each.slot_bytes for each in records)
    if _LEAST_STATES <= states <= slots:  # all optimizers count together
        name, widest = max((each.widest for each in session.states), key=lambda each: each[1])
        advice = f"with states.sub_group_bytes: {format_size(_eighth(states))} most of them leave memory"
        if 3 * widest >= states:
            advice = (
                f"no states.sub_group_bytes cuts the {readable_size(widest)} of {name}, for which a slot has "
                "room. Give that parameter an optimizer of its own whose states stay"
            )
        notices.warn_once(
            "slots",
            f"offloading the states of the optimizer frees nothing: they are {readable_size(states)}, and "
            f"the slots that updates go through hold {readable_size(slots)}; {advice}",
            NothingSavedWarning,
        )


def _eighth(nbytes: int) -> int:
    """Return an eighth, in whole MiB or, below one, KiB.

    Drives work on some of it while others are in use.
    """
    eighth = nbytes // 8
    unit_bits = 20 if eighth >= 1 << 20 else 10
    return max(eighth >> unit_bits, 1) << unit_bits


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
        message = str(config.source.error(("states", "update"), idle))
        warn(message, NoEffectWarning)
    if on_cpu and (why := saves_nothing(config.store)) is not None:
        message = f"the model is on the CPU, so that offloading saves less than it seems to: {why}"
        warn(message, NothingSavedWarning)


def is_checkpointed(layer: nn.Module) -> bool:
    """Return True if the layer's own framework has its forward run again in backward.

    Layers of Hugging Face models say so in an attribute; PyTorch wraps those that are recomputed.
    """
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    is_wrapped = wrappers is not None and isinstance(layer, wrappers.CheckpointWrapper)
    return is_wrapped or bool(getattr(layer, "gradient_checkpointing", False))
