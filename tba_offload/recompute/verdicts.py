"""What is known of second runs of layers: whether one gives the bits of the first one.

Layers that the planner may recompute are tried before; what a trial finds different, or cannot run, is never
chosen. What the user has placed is recomputed, and compared when it is recomputed for the first time.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_offload.errors import warn
from tba_offload.layers.guards import has_hooks, is_scaled, is_scripted
from tba_offload.layers.nested import modules_in
from tba_offload.recompute.observation import Observation
from tba_offload.recompute.tallies import Tallies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import nn

    from tba_offload.layers.randomness import Generator, RandomState
    from tba_offload.layers.stack import Layer
    from tba_offload.recompute.modules import Modules

SCRIPTED = "it holds TorchScript, whose first runs are not compiled as later ones are"
NESTED = "it saves nested tensors, whose shapes cannot be compared"
OTHER_NUMBERS = "its second run gives other numbers than the first"
_HOOKED = "a program has hooked into its forward, and its hooks would run twice"
_STATE_OUTSIDE = (
    "if that comes from state that neither the layer nor its arguments hold, the second run has changed it "
    "once more: place such a layer keep or offload"
)


class Mode(NamedTuple):
    """For what a verdict holds: a module that trains may do what it does not do otherwise.

    Attributes:
        layer: Index of the layer.
        training: Which of its modules train.
    """

    layer: int
    training: tuple[bool, ...]


class Verifier:
    """What a session knows of second runs.

    Args:
        layers: The layers of the session.
        generators: What random numbers come from.
        not_compared: Why a layer must not be run only to be compared; ``None`` if it may.
        tell: Is given a sentence about layers that the planner cannot have recomputed, once for each cause.

    Attributes:
        verdicts: Of each mode that was judged: what is wrong with its second run, ``None`` if nothing is.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        generators: Sequence[Generator],
        not_compared: Callable[[nn.Module], str | None],
        tell: Callable[[str], object],
    ) -> None:
        self.layers = layers
        self._generators = generators
        self._not_compared = not_compared
        self._tell = tell
        self.verdicts: dict[Mode, str | None] = {}
        self._told: set[str] = set()
        self._awaited: set[int] = set()  # layers of which a run of this step is compared
        self._random: RandomState | None = None
        self._unfilled: dict[Mode, frozenset[int]] = {}
        self._runs = [itertools.count() for _ in layers]
        self._tallies = [Tallies() for _ in layers]
        self._modules: list[Modules | None] = [None] * len(layers)  # as the latest run of each found them

    def begin_step(self) -> None:
        """Record that a layer that was to be compared in a step that failed is compared in the next one."""
        self._awaited.clear()

    def close(self) -> None:
        """Forget what modules were found with: forwards of the session are among it."""
        self._modules = [None] * len(self.layers)

    def may_try(self, mode: Mode) -> bool:
        """Whether a second run of a layer tells something, and changes nothing."""
        if mode in self.verdicts:
            return False
        module = self.layers[mode.layer].module
        reason = self._not_compared(module)
        if is_scripted(module):
            reason = SCRIPTED
        elif has_hooks(module):
            reason = _HOOKED
        if reason is not None:
            self.decline(mode, reason)
            return False
        return not is_scaled()

    def may_plan(self, index: int) -> bool:
        """Whether a second run of this layer gave the bits of the first one, in each mode that was tried."""
        verdicts = [fault for mode, fault in self.verdicts.items() if mode.layer == index]
        return bool(verdicts) and all(fault is None for fault in verdicts)

    def is_trusted(self, mode: Mode) -> bool:
        """Whether a second run of a layer gave the bits of the first one."""
        return self.verdicts.get(mode, "") is None

    def may_repeat(self, mode: Mode) -> bool:
        """Whether the planner's choice to recompute a layer can be followed now."""
        return self.is_trusted(mode) and not has_hooks(self.layers[mode.layer].module)

    def compares(self, mode: Mode) -> bool:
        """Whether the run that begins is compared as a whole: the first one of each layer in each mode."""
        index = mode.layer
        if index in self._awaited or mode in self.verdicts:
            return False
        if self._not_compared(self.layers[index].module) is not None:
            return False
        self._awaited.add(index)
        return True

    def judge(self, mode: Mode, fault: str | None) -> None:
        """Take note of what came of a second run; one fault is enough."""
        if fault is None:
            self.verdicts.setdefault(mode, None)
        else:
            self.verdicts[mode] = fault

    def withdraw(self, mode: Mode, fault: str) -> None:
        """Have a fault of one layer stand for all of its class, so that not each of them costs a step."""
        kind = type(self.layers[mode.layer].module)
        for known in [mode, *self.verdicts]:
            if type(self.layers[known.layer].module) is kind:
                self.verdicts[known] = fault

    def decline(self, mode: Mode, fault: str) -> None:
        """Record that the planner has to do without recomputing a layer; each cause is told once."""
        self.judge(mode, fault)
        if fault in self._told:
            return
        self._told.add(fault)
        sentence = f"{self.name_of(mode.layer)} is not recomputed by the planner: {fault}"
        if fault == OTHER_NUMBERS:
            warn(f"{sentence}; {_STATE_OUTSIDE}", RuntimeWarning)
        else:
            self._tell(sentence)

    def warn(self, mode: Mode, what: str) -> None:
        """Say what is to be known of a layer that the user has placed, once."""
        if what not in self._told:
            self._told.add(what)
            warn(f"{self.name_of(mode.layer)} {what}", RuntimeWarning)

    def is_judged(self, mode: Mode) -> bool:
        """Whether a second run of a layer was tried, or cannot be."""
        return mode in self.verdicts

    def mode_of(self, index: int) -> Mode:
        """Return the mode that a layer is in now; it may be in another one when backward comes to it."""
        return Mode(index, tuple([module.training for module in modules_in(self.layers[index].module)]))

    def name_of(self, index: int) -> str:
        """Return a layer as messages call it."""
        return str(self.layers[index].id)

    def observe(self, mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observation:
        """Take down what a layer finds that is about to run for the first time.

        Raises:
            TooManyError: It is given more objects than can be looked through.
        """
        index = mode.layer
        module, tallies, known = self.layers[index].module, self._tallies[index], self._modules[index]
        observed = Observation(module, args, kwargs, self._generators, tallies, known, self._random)
        self._modules[index] = observed.found.modules if observed.found.modules.is_shared else None
        self._random = observed.random
        return observed

    def unfilled(self, mode: Mode) -> Collection[int]:
        """Places, in the order of saving, of tensors that kernels of a layer do not fill."""
        return self._unfilled.get(mode, frozenset())

    def leave_out(self, mode: Mode, places: frozenset[int]) -> None:
        """Tensors at these places are not looked at any more."""
        self._unfilled[mode] = places.union(self.unfilled(mode))

    def next_run(self, index: int) -> int:
        """Return a number for each run of a layer that is recomputed, one more than that of its last one."""
        return next(self._runs[index])
