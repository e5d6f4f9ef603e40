"""Recomputation that is verified: a layer's second run gives the bits of its first one, or it is noticed.

A :class:`Run` stands in front of a layer's forward where backward is going to run it again. The first time it
takes down what the layer finds: parameters, buffers, arguments, the state of random generators, and of some
runs a digest of the output. The second time all of that is put back, and compared.

Layers that the planner may recompute are tried before: in the first step that they run in, backward runs them
a second time on what they were given, and drops the outcome. What such a :class:`Trial` finds different, or
cannot run, is never chosen.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from tba_offload.errors import (
    RecomputationError,
    SavedTensorModifiedError,
    TbaError,
    UnsupportedError,
)
from tba_offload.layers import settings
from tba_offload.layers.checkpoint import with_tensors, without_tensors
from tba_offload.layers.graph import first_differentiable, latest_node
from tba_offload.layers.guards import has_hooks, is_scaled, is_scripted
from tba_offload.layers.nested import TooManyError
from tba_offload.layers.randomness import RandomState
from tba_offload.recompute.digest import Digest, digests, equal
from tba_offload.recompute.saved_again import SavedAgain
from tba_offload.recompute.surroundings import Surroundings, holds_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from tba_offload.layers.randomness import Generator
    from tba_offload.layers.stack import Layer

COMPARED_EVERY = 16
"""Steps from one comparison of a trusted layer to the next; the layers take turns.

A comparison runs the layer once more, which is a third of what the layer takes forward and backward: with six
layers, one in sixteen steps comes to 0.35 % of them, with twelve to 0.17 %.
"""

_NO_HOOKS = "support saved tensor hooks"
"""What errors of transforms say that were called under hooks."""

_SCRIPTED = "it holds TorchScript, whose first runs are not compiled as later ones are"
_HOOKED = "a program has hooked into its forward, and its hooks would run twice"
_TOO_MANY = "it holds, or is given, too many objects to look through"
_NOT_ALL = (
    "is recomputed, but reaches more objects than are looked through: if it changes one of them, a second "
    "run changes that once more"
)
_OTHER_NUMBERS = "its second run gives other numbers than the first"
_STATE_OUTSIDE = (
    "if that comes from state that neither the layer nor its arguments hold, the second run has changed it "
    "once more: place such a layer keep or offload"
)
_ARGUMENTS_GONE = "what it was called with is changed when backward comes to it"


class Observation(NamedTuple):
    """What was taken down in a layer's first run.

    Attributes:
        found: What it found beside its tensors, before it ran.
        settings: Those of PyTorch that were in force.
        random: What the generators were about to draw; ``None`` if nothing was drawn.
        output: Digests of what it put out; ``None`` if the second run is not compared.
        samples_only: Whether these are samples and no sums.
    """

    found: Surroundings
    settings: settings.Settings
    random: RandomState | None
    output: list[Digest] | None
    samples_only: bool = False

    def repeat(self, forward: Callable[..., object], args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        """Runs the layer a second time, in what the first run found.

        Raises:
            SavedTensorModifiedError: Something of that was changed in place since.
        """
        with contextlib.ExitStack() as around:
            around.enter_context(self.found.restored())
            if self.random is not None:
                around.enter_context(self.random.replayed())
            if self.settings != settings.current():
                around.enter_context(settings.in_force(self.settings))
            return forward(*args, **kwargs)

    def is_output(self, output: object) -> bool:
        """Whether the first run put out the same, as far as it is compared."""
        if self.output is None:
            return True
        return equal(digests(output, samples_only=self.samples_only), self.output)


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
        self._verdicts: dict[Mode, str | None] = {}
        self._told: set[str] = set()
        self._in_turn: int | None = None
        self._awaited: set[int] = set()  # layers of which a run of this step is compared

    def begin_step(self, number: int) -> None:
        """Chooses the layer whose output is compared in this step, if any."""
        turn, rest = divmod(number, COMPARED_EVERY)
        self._in_turn = None if rest else turn % len(self.layers)
        self._awaited.clear()

    def may_try(self, mode: Mode) -> bool:
        """Whether a second run of a layer tells something, and changes nothing."""
        if mode in self._verdicts:
            return False
        module = self.layers[mode.layer].module
        reason = self._not_compared(module)
        if is_scripted(module):
            reason = _SCRIPTED
        elif has_hooks(module):
            reason = _HOOKED
        if reason is not None:
            self.decline(mode, reason)
            return False
        return not is_scaled()

    def may_plan(self, index: int) -> bool:
        """Whether a second run of this layer gave the bits of the first one, in each mode that was tried."""
        verdicts = [fault for mode, fault in self._verdicts.items() if mode.layer == index]
        return bool(verdicts) and all(fault is None for fault in verdicts)

    def is_trusted(self, mode: Mode) -> bool:
        """Whether a second run of a layer gave the bits of the first one."""
        return self._verdicts.get(mode, "") is None

    def may_repeat(self, mode: Mode) -> bool:
        """Whether the planner's choice to recompute a layer can be followed now."""
        return self.is_trusted(mode) and not has_hooks(self.layers[mode.layer].module)

    def may_rescue(self, mode: Mode) -> bool:
        """Whether a second run of a layer may stand for its first one."""
        return self.may_repeat(mode) and not is_scaled()

    def compares(self, mode: Mode) -> bool:
        """Whether the run that begins is compared: each layer's first one, later that of one in its turn."""
        index = mode.layer
        if index in self._awaited or (mode in self._verdicts and index != self._in_turn):
            return False
        if self._not_compared(self.layers[index].module) is not None:
            return False
        self._awaited.add(index)
        return True

    def judge(self, mode: Mode, fault: str | None) -> None:
        """Takes note of what came of a second run; one fault is enough."""
        if fault is None:
            self._verdicts.setdefault(mode, None)
        else:
            self._verdicts[mode] = fault

    def decline(self, mode: Mode, fault: str) -> None:
        """The planner has to do without recomputing a layer; each cause is told once."""
        self.judge(mode, fault)
        if fault in self._told:
            return
        self._told.add(fault)
        sentence = f"{self.name_of(mode.layer)} is not recomputed by the planner: {fault}"
        if fault == _OTHER_NUMBERS:
            warnings.warn(f"{sentence}; {_STATE_OUTSIDE}", RuntimeWarning, stacklevel=2)
        else:
            self._tell(sentence)

    def warn(self, mode: Mode, what: str) -> None:
        """Says what is to be known of a layer that the user has placed, once."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"{self.name_of(mode.layer)} {what}", RuntimeWarning, stacklevel=2)

    def is_judged(self, mode: Mode) -> bool:
        """Whether a second run of a layer was tried, or cannot be."""
        return mode in self._verdicts

    def mode_of(self, index: int) -> Mode:
        """The mode that a layer is in now; it may be in another one when backward comes to it."""
        return Mode(index, tuple(module.training for module in self.layers[index].module.modules()))

    def name_of(self, index: int) -> str:
        """A layer as messages call it."""
        layer = self.layers[index].id
        return f"layer {layer.number} ({layer.name})"

    def observe(
        self,
        index: int,
        forward: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        compares: bool,
        samples_only: bool = False,
    ) -> tuple[object, Observation | None, str | None]:
        """Runs a layer for the first time.

        Returns:
            The output, what was taken down, and what keeps a second run from finding the same, if anything.
        """
        arguments = _by_name(args, kwargs)
        try:
            found = Surroundings(self.layers[index].module, arguments)
        except TooManyError:
            return forward(*args, **kwargs), None, _TOO_MANY
        random = RandomState((*self._generators, *found.generators))
        in_force = settings.current()
        output = forward(*args, **kwargs)
        drawn = None if random.is_current() else random
        taken = digests(output, samples_only=samples_only) if compares else None
        observation = Observation(found, in_force, drawn, taken, samples_only)
        return output, observation, _change(found, arguments)


class Arguments:
    """What a layer was called with, for a second run of it.

    Args:
        args: By position.
        kwargs: By name.
        hold: Takes a hold of a tensor among them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Callable[[Tensor], Any]) -> None:
        tensors: list[Tensor] = []
        self._layout = without_tensors((args, tuple(kwargs.items())), tensors)
        self._held = [(hold(tensor), tensor.requires_grad) for tensor in tensors]

    def keep_no_memory(self) -> bool:
        """Whether there is a hold of each tensor, and no other is hidden in an object."""
        return all(hold is not None for hold, _ in self._held) and not holds_tensors(self._layout)

    def lie_in(self, record: object) -> bool:
        """Whether a record has the bytes of a tensor among them."""
        return any(getattr(hold, "record", None) is record for hold, _ in self._held)

    def again(self, fetch: Callable[[Any], Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The same arguments, apart from any graph; ``None`` if a tensor among them is not what it was.

        Args:
            fetch: Gives back what was held, or ``None``.
        """
        tensors: list[Tensor] = []
        for hold, wanted in self._held:
            tensor = fetch(hold)
            if tensor is None:
                return None
            tensors.append(tensor.detach().requires_grad_(wanted))
        args, kwargs = with_tensors(self._layout, tensors)
        return args, dict(kwargs)


class Run:
    """One execution of a layer that backward repeats.

    Args:
        verifier: What the session knows of second runs.
        mode: The layer, and what it is in.
        forward: What runs it.
    """

    def __init__(self, verifier: Verifier, mode: Mode, forward: Callable[..., object]) -> None:
        self.__self__ = verifier.layers[mode.layer].module  # by which frameworks find a layer's settings
        self._verifier = verifier
        self._mode = mode
        self._forward = forward
        self._compares = verifier.compares(mode)
        self._saved = SavedAgain(self._sentence, verifier.name_of(mode.layer))
        self._observed: Observation | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Runs the layer: the first time to take down what it finds, then to repeat that.

        Raises:
            UnsupportedError: A second run would not find what the first one did.
            SavedTensorModifiedError: Something that the first run found was changed in place since.
            RecomputationError: A second run gives other numbers than the first, or fails.
        """
        return (
            self._first(args, kwargs) if self._observed is None else self._again(self._observed, args, kwargs)
        )

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if is_scripted(self.__self__):
            raise UnsupportedError(self._sentence(_SCRIPTED))
        try:
            with self._saved.in_first_run():
                output, observed, fault = self._verifier.observe(
                    self._mode.layer, self._forward, args, kwargs, compares=self._compares
                )
        except RuntimeError as error:
            if _NO_HOOKS not in str(error):
                raise
            raise UnsupportedError(self._sentence(f"it forbids saved-tensor hooks ({error})")) from error
        if observed is not None and not observed.found.is_complete:
            self._verifier.warn(self._mode, _NOT_ALL)
        if fault is not None:
            self._verifier.judge(self._mode, fault)
            raise UnsupportedError(self._sentence(fault))
        self._observed = observed
        return output

    def _again(self, observed: Observation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if self._compares and observed.output:
            self._compares = False
            self._compare(observed, args, kwargs)
        with self._saved.in_second_run():
            return observed.repeat(self._forward, args, kwargs)

    def _compare(self, observed: Observation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the layer once more than backward needs it: that stops at the last tensor that was saved."""
        fault = _fault_of(observed, self._forward, args, kwargs)
        self._verifier.judge(self._mode, fault)
        if fault is not None:
            raise RecomputationError(self._sentence(fault))

    def _sentence(self, fault: str) -> str:
        name = self._verifier.name_of(self._mode.layer)
        return f"{name} cannot be recomputed: {fault}; place it keep or offload"


class Watched:
    """One execution of a layer that is kept or offloaded, and may be run again on what it was called with.

    Args:
        verifier: What the session knows of second runs.
        mode: The layer, and what it is in.
        forward: What runs it.
        device: The device that it runs on.
        hold: Takes a hold of an argument.
        fetch: Gives back what was held; ``None`` if it is changed or gone.
    """

    def __init__(
        self,
        verifier: Verifier,
        mode: Mode,
        forward: Callable[..., object],
        *,
        device: torch.device,
        hold: Callable[[Tensor], Any],
        fetch: Callable[[Any], Tensor | None],
    ) -> None:
        self._verifier = verifier
        self._mode = mode
        self._forward = forward
        self._autocast = autocast_here({device.type, "cpu"})
        self._hold = hold
        self._fetch = fetch
        self._observed: Observation | None = None
        self._arguments: Arguments | None = None


class Trial(Watched):
    """A second run of a layer that is kept or offloaded, to see whether it could be recomputed.

    It takes place where a recomputation would: when backward comes to the layer. The hold of an argument may
    keep its memory where none of the layers has saved it.
    """

    _count: int | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Runs the layer as it would run without a trial."""
        output, observed, fault = self._verifier.observe(
            self._mode.layer, self._forward, args, kwargs, compares=True
        )
        if observed is not None and not observed.found.is_complete:
            fault = fault or _TOO_MANY
        if fault is not None or observed is None or not observed.output:
            self._verifier.decline(self._mode, fault or "it puts out nothing that could be compared")
            return output
        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            self._observed, self._arguments = observed, Arguments(args, kwargs, self._hold)
            # After the hooks of the tensor, by which sharded parameters are gathered.
            tensor.grad_fn.register_prehook(lambda _: self._take_place())
        return output

    def saved(self, count: int) -> None:
        """Takes note of how many tensors were saved in the layer's first run."""
        self._count = count

    def _take_place(self) -> None:
        observed, self._observed = self._observed, None
        arguments, self._arguments = self._arguments, None
        if observed is None or arguments is None or self._verifier.is_judged(self._mode):
            return
        given = arguments.again(self._fetch)
        del arguments
        if given is None:
            self._verifier.decline(self._mode, _ARGUMENTS_GONE)
            return
        try:
            with self._autocast(), torch.enable_grad():
                fault = _fault_of(observed, self._forward, *given, count=self._count)
        except SavedTensorModifiedError as error:
            fault = str(error)  # what is offloaded may well be used so
        if fault is None:
            self._verifier.judge(self._mode, None)
        else:
            self._verifier.decline(self._mode, fault)


def _fault_of(
    observed: Observation,
    forward: Callable[..., object],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    count: int | None = None,
) -> str | None:
    """Runs a layer a second time and drops what it saves; tells what is wrong with that, if anything.

    Args:
        observed: What was taken down in the first run.
        forward: What runs the layer.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        count: How many tensors the first run saved, if that is known.

    Raises:
        SavedTensorModifiedError: Something that the first run found was changed in place since.
    """
    saved = _Saved()
    try:
        with saved_tensors_hooks(saved.pack, refuse_unpack), observed.found.undoing():
            output = observed.repeat(forward, args, kwargs)
    except TbaError:
        raise
    except torch.OutOfMemoryError:
        if _has_peers():  # which go on in the layer's collective operations, and must not do so alone
            raise
        return "there was no memory to try it"
    except Exception as error:  # noqa: BLE001 - the layer's own code; what it says is told
        return f"a second run of it fails ({type(error).__name__}: {error})"
    if count is not None and saved.count != count:
        return f"its first run saves {count} tensors for backward and its second one {saved.count}"
    if not saved.are_final():
        return "its last operation saves a tensor before it fills it"
    return None if observed.is_output(output) else _OTHER_NUMBERS


def _change(found: Surroundings, arguments: Mapping[int | str, object]) -> str | None:
    """What a run has changed of what a second one would find."""
    argument = found.changed_argument(arguments)
    if argument is not None:
        return f"its forward changes the tensors in its argument {argument}, and would change them twice"
    state = found.changed_in_place()
    return None if state is None else f"its forward changes {state}, and would change it twice"


def _by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """Arguments by position or name."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments


def _has_peers() -> bool:
    """Whether other ranks may be running the same layer, and its collective operations."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _Saved:
    """What a comparison saves. It is not needed, but for a look at what the last operation saves.

    A checkpoint ends a second run when the last tensor was saved: one that its operation fills only later, as
    that of ``rrelu`` does with its noise, would be taken as it is before.
    """

    def __init__(self) -> None:
        self.count = 0
        self._operation = -1
        self._last: list[tuple[Tensor, list[Digest]]] = []

    def pack(self, saved: Tensor) -> None:
        """Takes note of a tensor that may be filled later: one that has no graph yet.

        Raises:
            RuntimeError: Checkpoints compare shapes, and each nested tensor that is made has one of its own.
        """
        self.count += 1
        if saved.is_nested:
            raise RuntimeError("it saves nested tensors, whose shapes are never the same")
        if (operation := latest_node()) != self._operation:
            self._operation, self._last = operation, []
        if not saved.requires_grad and not saved._is_view():  # gathered parameters are views
            self._last.append((saved, digests(saved)))

    def are_final(self) -> bool:
        """Whether all that the last operation saved was filled before."""
        return all(equal(digests(saved), found) for saved, found in self._last)


def refuse_unpack(_: None) -> Tensor:
    """What a second run saves is not there.

    Raises:
        AssertionError: Always.
    """
    raise AssertionError("there is no backward through a second run of a layer")


def autocast_here(kinds: set[str]) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Makes contexts with the autocast settings of the calling code, for kinds of devices."""
    cache = torch.is_autocast_cache_enabled()
    settings = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)
    ]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return again
