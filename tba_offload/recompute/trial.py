"""Second runs of layers that are kept or offloaded, and what these are run on.

Layers that the planner may recompute are tried before: in the first step that they run in, backward runs them
a second time on what they were given, and drops the outcome.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tba_offload.device.peers import has_peers
from tba_offload.errors import SavedTensorModifiedError, TbaError
from tba_offload.layers import untraced
from tba_offload.layers.checkpoint import with_tensors, without_tensors
from tba_offload.layers.graph import first_differentiable
from tba_offload.layers.nested import TooManyError
from tba_offload.recompute.observation import TOO_MANY
from tba_offload.recompute.verdicts import NESTED, OTHER_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from tba_offload.recompute.observation import Observation
    from tba_offload.recompute.verdicts import Mode, Verifier

_ARGUMENTS_GONE = "what it was called with is changed when backward comes to it"
_TOO_MUCH_OUT = "it puts out too many objects to look through"
_NOTHING_OUT = "it puts out nothing that could be compared"
_ASKED_TWICE = "its backward asks for a saved tensor twice, and a checkpoint gives each once"


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

    def again(self, fetch: Callable[[Any], Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the same arguments, apart from any graph; None if a tensor among them is not what it was.

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


class Trial:
    """A second run of a layer that is kept or offloaded, to see whether it could be recomputed.

    It takes place where a recomputation would: when backward comes to the layer. The hold of an argument may
    keep its memory where none of the layers has saved it.

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
        self._count: int | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> object:
        """Run the layer as it would run without a trial."""
        observed = self._look(args, kwargs)
        if observed is None:
            return self._forward(*args, **kwargs)
        observed.look_closely(args, kwargs)
        output = self._forward(*args, **kwargs)
        fault = observed.change(args, kwargs) or _note_output(observed, output)
        tensor = first_differentiable(output)
        if fault is not None:
            self._verifier.decline(self._mode, fault)
        elif tensor is not None and tensor.grad_fn is not None:
            self._observed, self._arguments = observed, Arguments(args, kwargs, self._hold)
            # After the hooks of the tensor, by which sharded parameters are gathered.
            tensor.grad_fn.register_prehook(lambda _: self._take_place())
        return output

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observation | None:
        """Return what the layer finds; None if a second run would change of that what cannot be put back."""
        try:
            observed = self._verifier.observe(self._mode, args, kwargs)
        except TooManyError:
            self._verifier.decline(self._mode, TOO_MANY)
            return None
        unknown = observed.found.unknown
        if unknown is None:
            return observed
        self._verifier.decline(
            self._mode, f"it reaches {unknown}, and a second run may change that once more"
        )
        return None

    def saved(self, count: int) -> None:
        """Take note of how many tensors were saved in the layer's first run."""
        self._count = count

    def noticing(self, unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Give saved tensors back as ``unpack`` does, and notices one that a backward pass asks for twice.

        Functions of users do that which read ``ctx.saved_tensors`` more than once.
        """
        current_pass, given = -1, set[int]()

        def unpack_noticed(packed: object) -> Tensor:
            nonlocal current_pass
            now = torch._C._current_graph_task_id()
            if now == -1:  # looked at outside of backward, which a checkpoint allows
                return unpack(packed)
            if now != current_pass:
                current_pass = now
                given.clear()
            if id(packed) in given:
                self._verifier.decline(self._mode, _ASKED_TWICE)
            given.add(id(packed))
            return unpack(packed)

        return unpack_noticed

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
                fault = fault_of(observed, self._forward, *given, count=self._count)
        except SavedTensorModifiedError as error:
            fault = str(error)  # what is offloaded may well be used so
        if fault is None:
            self._verifier.judge(self._mode, None)
        else:
            self._verifier.decline(self._mode, fault)


def fault_of(
    observed: Observation,
    forward: Callable[..., object],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    count: int | None = None,
) -> str | None:
    """Run a layer a second time and drop what it saves; tell what is wrong with that, if anything.

    Args:
        observed: What was taken down in the first run.
        forward: What runs the layer.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        count: How many tensors the first run saved, if that is known.

    Raises:
        SavedTensorModifiedError: Something that the first run found was changed in place since.
    """
    again = _Count()
    try:
        with saved_tensors_hooks(again.pack, refuse_unpack):
            output = observed.try_again(forward, args, kwargs)
    except TbaError:
        raise
    except torch.OutOfMemoryError:
        if has_peers():  # which go on in the layer's collective operations, and must not do so alone
            raise
        return "there was no memory to try it"
    except Exception as error:  # noqa: BLE001 - the layer's own code; what it says is told
        return f"a second run of it fails ({type(error).__name__}: {error})"
    if count is not None and again.saved != count:
        return f"its first run saves {count} tensors for backward and its second one {again.saved}"
    return None if observed.is_output(output) else OTHER_NUMBERS


def _note_output(observed: Observation, output: object) -> str | None:
    """Take down what a layer has put out; tell why that cannot be compared, if it cannot."""
    try:
        observed.note_output(output)
    except TooManyError:
        return _TOO_MUCH_OUT
    return None if observed.is_compared else _NOTHING_OUT


class _Count:
    """Counts the tensors that a comparison saves, and keeps none of them."""

    def __init__(self) -> None:
        self.saved = 0

    @untraced.hook
    def pack(self, saved: Tensor) -> None:
        """Take note of a tensor.

        Raises:
            RuntimeError: The tensor is nested.
        """
        self.saved += 1
        if saved.is_nested:
            raise RuntimeError(NESTED)


def refuse_unpack(_: None) -> Tensor:
    """Return what a second run saves is not there.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(
        "there is no backward through a second run: the layer asks for gradients in its forward"
    )


def autocast_here(kinds: set[str]) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Make contexts with the autocast settings of the calling code, for kinds of devices."""
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
