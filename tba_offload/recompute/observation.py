"""What a layer's first run finds, for a second run of it to find the same."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from tba_offload.layers import settings
from tba_offload.layers.context import Context
from tba_offload.layers.guards import holds_cache
from tba_offload.layers.randomness import RandomState
from tba_offload.recompute.digests import digests, equal
from tba_offload.recompute.surroundings import Surroundings, argument_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from tba_offload.device.digest import Digest
    from tba_offload.layers.randomness import Generator
    from tba_offload.recompute.modules import Modules
    from tba_offload.recompute.tallies import Tallies

_turn = threading.RLock()
"""Held during a second run: two backward passes that put the same buffers and generators back would find each
other's. A layer may run another one a second time."""

TOO_MANY = "it holds, or is given, too many objects to look through"


class Observation:
    """What was taken down of a layer's first run.

    Args:
        layer: The layer, which is about to run.
        args: What its forward is given by position.
        kwargs: What its forward is given by name.
        generators: What random numbers come from.
        tallies: Buffers of the layer that only runs with gradients write to.
        known: The modules of the layer as an earlier run found them.
        before: The state of the generators in an earlier run.

    Attributes:
        found: What the layer found beside its tensors, before it ran.
        random: What the generators were about to draw.

    Raises:
        TooManyError: The arguments hold more objects than can be looked through.
    """

    __slots__ = (
        *("_context", "_given", "_large", "_output", "_samples_only", "_settings"),
        *("found", "random"),
    )

    def __init__(
        self,
        layer: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        generators: Sequence[Generator],
        tallies: Tallies,
        known: Modules | None = None,
        before: RandomState | None = None,
    ) -> None:
        self.found = Surroundings(layer, _by_name(args, kwargs), tallies, known)
        self.random = RandomState.of((*generators, *self.found.generators), before)
        self._settings = settings.current()
        self._context = Context()
        self._output: list[Digest] | None = None
        self._samples_only = False
        self._large: dict[str, list[Digest]] | None = None
        self._given: dict[int | str, list[Digest]] = {}

    def look_closely(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take digests of what is not copied, for :meth:`change` to see changes that no version tells.

        Args:
            args: What forward is given by position.
            kwargs: What forward is given by name.
        """
        self._large = self.found.large()
        self._given = {key: digests(value) for key, value in _by_name(args, kwargs).items()}

    def change(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return what the run, which is over, has changed of what a second one would find; None for nothing.

        Args:
            args: What forward was given by position.
            kwargs: What forward was given by name.
        """
        self.random = self.random.drawn()
        self.found.end_first_run()
        arguments = _by_name(args, kwargs)
        argument = self.found.changed_argument(arguments) or self._changed_argument(arguments)
        if argument is not None and holds_cache(arguments.values()):
            return (
                "its forward appends to a cache of keys and values, and would do so twice: switch it off "
                "(use_cache=False, to the model or in its config)"
            )
        if argument is not None:
            return f"its forward changes the tensors in its argument {argument}, and would change them twice"
        state = self.found.changed_in_place() or self._changed_large()
        return None if state is None else f"its forward changes {state}, and would change it twice"

    def _changed_argument(self, arguments: Mapping[int | str, Any]) -> str | None:
        """Which argument has changed in a way that no version tells; looked for once.

        Batch norm does not count what it does to the running statistics that it is given.
        """
        before, self._given = self._given, {}
        changed = (key for key in before if not equal(before[key], digests(arguments[key])))
        return next((argument_name(key) for key in changed), None)

    def _changed_large(self) -> str | None:
        """Return what has changed in a way that no version tells; looked for once."""
        before, self._large = self._large, None
        if before is None:
            return None
        now = self.found.large()
        return next((name for name in before if not equal(before[name], now.get(name, []))), None)

    def note_output(self, output: object, *, samples_only: bool = False) -> None:
        """Take down what the run put out.

        Raises:
            TooManyError: It is more than can be looked through.
        """
        self._samples_only = samples_only
        self._output = digests(output, samples_only=samples_only)

    @property
    def is_compared(self) -> bool:
        """Whether an output was taken down to compare others with."""
        return bool(self._output)

    def is_output(self, output: object) -> bool:
        """Whether the first run put out the same, as far as that was taken down."""
        if self._output is None:
            return True
        return equal(digests(output, samples_only=self._samples_only), self._output)

    def repeat(
        self, forward: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        """Run the layer a second time, in what the first run found.

        Raises:
            SavedTensorModifiedError: Something of that was changed in place since.
        """
        with _turn, self._as_found():
            return self._context.run(forward, *args, **kwargs)

    def try_again(
        self, forward: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        """As :meth:`repeat`; what the run writes into tensors of the layer is undone, versions and all."""
        with _turn, self.found.undoing():
            return self.repeat(forward, args, kwargs)

    @contextlib.contextmanager
    def _as_found(self) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            around.enter_context(self.found.restored())
            around.enter_context(self.random.replayed())
            if self._settings != settings.current():
                around.enter_context(settings.in_force(self._settings))
            yield


def _by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Arguments by position or name."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments
