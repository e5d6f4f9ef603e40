"""Steps of a session. A session detects where steps begin and end, so a training loop need not mark steps.

A step begins with the model's first forward that records a graph. A step contains all micro-batches up to the
update of the model's parameters by the optimizers. A step ends in one of four cases:

* Optimizers have updated all parameters with a gradient.
* Optimizers have updated some of the parameters with a gradient, and the model's next forward begins.
* The program has dropped or zeroed the gradients without an optimizer. For example, a loop updates the
  weights itself, or a gradient scaler skips the update.
* The graph of the step is freed without a backward pass, as in an evaluation. A step without a backward pass
  is not recorded.

A step does not end when hooks remove gradients during backward, or when ``torch.autograd.grad`` returns
gradients. A step never ends during a backward pass, because gradient hooks may call optimizers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tba_offload.errors import ConfigError, NoEffectWarning, SessionError
from tba_offload.report.timeline import TimelineEvent
from tba_offload.session.notices import EARLY, MOST_UNSEEN
from tba_offload.states.parameters import parameters_of
from tba_offload.torch_private import is_recomputation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from tba_offload.device.meters import MemoryMeter
    from tba_offload.report.log import StepRecord
    from tba_offload.session.session import Session

Tokens = int | Callable[..., int | None]
"""Number of tokens of one micro-batch, or a function that gets the arguments of the model's forward and
returns this number."""


class Step:
    """One step of a session, see :meth:`Session.step`.

    Attributes:
        loss: Loss for the run log, set by the program: a number, or a tensor of one element. Setting a tensor
            does not wait for the device.
        tokens: Number of tokens, as passed to :meth:`Session.step`. The program may set ``tokens`` in the
            ``with`` block of the step. If ``None``, the tokens that the model receives are counted.
        model_flops: Number of floating-point operations, as passed to :meth:`Session.step`. The program may
            set ``model_flops`` in the ``with`` block of the step.
        record: The :class:`StepRecord`; ``None`` until the step has ended without an exception. On an
            accelerator, the record may lack the loss and the exact duration. ``session.records`` has the
            complete record once the device has finished the step.
        is_traced: Whether the user asked for a timeline of this step.
        over_time: Timeline of the step; ``None`` before the end of the step, or if no timeline was recorded.
        number: Number of the step in the run log, from 1. Before the step begins, the number is 0.
        opened_itself: True if the model's forward opened the step, and False if the program called
            :meth:`Session.step`.
        meter: The memory meter; ``None`` if memory is not measured.
        thread: Identifier of the thread that opened the step.
        began: Time at which the step began, by :func:`time.perf_counter`.
        has_failed: Whether a forward or an optimizer raised an exception in the step.
        is_skipped: Whether the gradients were dropped without an update.
        graph_end: Autograd's sequence number of the operation that made the output of the last layer.
        graphs: Weak references to hooks on the outputs of layers. Each hook lives as long as the graph of its
            layer.
        seen_tokens: Number of tokens that the model received.
        updates: Start and end of each optimizer step.
        updated: The ``id`` of each parameter that optimizers have updated in this step. An ``id`` stays
            valid, because the optimizer keeps the parameter alive.
        seconds: Duration of the step without optimizer steps, by the host's clock. If the model's forward
            opened the step, the duration ends with the last backward pass.
        optimizer_seconds: Duration of all optimizer steps since the end of the previous step; ``None`` if
            there were no optimizer steps.
        had_optimizer: Whether an optimizer's ``step()`` ran between the start and the end of this step.
        seconds_before: The part of ``optimizer_seconds`` before this step began.
    """

    def __init__(
        self, loop: Loop, meter: MemoryMeter | None, tokens: int | None, flops: float | None, *, trace: bool
    ) -> None:
        self._loop, self.meter, self.tokens, self.model_flops = loop, meter, tokens, flops
        self.loss: float | torch.Tensor | None = None
        self.record: StepRecord | None = None
        self.is_traced = trace
        self.over_time: Mapping[str, object] | None = None
        self.thread = threading.get_ident()
        self.began = self.seconds = self.seconds_before = 0.0
        self.optimizer_seconds: float | None = None
        self.opened_itself = self.has_failed = self.is_skipped = self.had_optimizer = False
        self.graph_end = 0
        self.updated: frozenset[int] = frozenset()
        self.graphs: list[weakref.ref[Callable[..., None]]] = []  # the finalizers of a WeakSet lose a Ctrl-C
        self.updates: list[tuple[float, float]] = []
        self.number = self.seen_tokens = 0

    def __enter__(self) -> Self:
        self._loop.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loop.end(self, failed=kind is not None)

    @property
    def timeline(self) -> TimelineEvent:
        """The timeline of the step. ``timeline.write(path)`` writes a picture or a trace.

        Raises:
            SessionError: The step recorded no timeline, has not ended, or has failed.
        """
        if self.over_time is None:
            raise SessionError("this step recorded no timeline. Call session.step(trace=True)")
        return TimelineEvent.model_validate(self.over_time)

    # ---- optimizers ------------------------------------------------------------------------------

    def update_times(self, backward_ends: Sequence[float]) -> list[tuple[float, float]]:
        """Return start and end of each optimizer step.

        The time of an optimizer step excludes the forward and backward passes of its closure.

        Args:
            backward_ends: Times at which backward passes ended.
        """
        return [
            (max([began, *(end for end in backward_ends if began < end < ended)]), ended)
            for began, ended in self.updates
        ]

    def stop(self, backward_ends: Sequence[float]) -> None:
        """Compute :attr:`seconds` and :attr:`optimizer_seconds` at the end of the step.

        Args:
            backward_ends: Times at which backward passes ended.
        """
        ended = backward_ends[-1] if self.opened_itself and backward_ends else time.perf_counter()
        updates = self.update_times(backward_ends)
        within = sum(max(min(until, ended) - since, 0.0) for since, until in updates)
        self.seconds, self.had_optimizer = ended - self.began - within, within > 0
        if updates or self.seconds_before > 0:
            self.optimizer_seconds = self.seconds_before + sum(until - since for since, until in updates)


class Loop:
    """The open step of a session, and the hooks that open and end steps.

    Args:
        session: The session.
        count_tokens: Function that returns the number of tokens of a micro-batch; ``None`` if the program
            marks all steps.

    Attributes:
        step: The open step; ``None`` between steps.
        opens_steps: Whether the model's forward opens steps.
        is_inert: Whether the process is a forked child, in which the session does nothing.
        session: The session; ``None`` after the session is closed.
    """

    def __init__(self, session: Session, count_tokens: Callable[..., int | None] | None) -> None:
        self.step: Step | None = None
        self.opens_steps, self.is_inert = count_tokens is not None, False
        self.session: Any = session
        self._seconds_between = 0.0  # duration of optimizer steps since the last step ended
        self._updating: tuple[Optimizer, float] | None = None  # the optimizer that runs, and its start
        self._has_closure = False  # whether that optimizer calls a closure
        self._outermost: nn.Module | None = None  # the module whose forward runs
        self._tokens_are_known = False  # whether the tokens of that forward were counted
        self._handles: list[RemovableHandle] = []
        if count_tokens is not None:
            self._count_tokens = count_tokens
            self._install(list(_callers(session.modules, [layer.module for layer in session.layers])))

    def _install(self, callers: Sequence[nn.Module]) -> None:
        own = weakref.ref(self)  # the hooks are global, and must not keep a model alive
        self._handles += [
            register_optimizer_step_pre_hook(_Hook(own, Loop._optimizer_begins)),
            register_optimizer_step_post_hook(_Hook(own, Loop._optimizer_ended)),
        ]
        for module in callers:
            before, after = _ModelHook(own, Loop._model_begins), _ModelHook(own, Loop._model_ended)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Remove all hooks. Later forwards open no step."""
        for handle in self._handles:
            handle.remove()
        self.session = None  # in a cycle, the model would stay alive

    # ---- one step --------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begin a step.

        Raises:
            SessionError: Another step is open, the session is closed, or the process is a forked child.
        """
        if self.is_inert:
            raise SessionError("this session belongs to the parent process. Call attach() in the child")
        if self.session is None:
            raise SessionError("this session is closed. Call attach() again")
        if not step.opened_itself:
            self.finish()
        if self.step is not None:
            raise SessionError("another step of this session is still open. End that step first")
        self.session.begin_step(step)
        step.seconds_before, self._seconds_between = self._seconds_between, 0.0
        self.step = step

    def end(self, step: Step, *, failed: bool, is_broken: bool = True) -> None:
        """End a step, and record the step unless the step failed.

        Args:
            step: The step.
            failed: If True, the step is not recorded.
            is_broken: If True, all saved storages of a failed step are dropped, so backward of the step is no
                longer possible.
        """
        if self.is_inert:
            return
        self._updating = None  # if the whole step ran in a closure, the optimizer's time belongs to no step
        try:
            self.session.end_step(step, failed=failed, is_broken=failed and is_broken)
        finally:
            self.step = None
        if not failed:
            step.record = self.session.record_step(step)

    def open_step(self) -> None:
        """Open a step when a forward begins, unless this forward belongs to the open step."""
        step = self.step
        if self._updating is not None and not self._has_closure:
            self._updating = None  # the optimizer raised an exception, so its post hook did not run
            self.fail()
        elif self._updating is not None and step is not None and not step.has_failed:
            self.session.memory.resume()
            return
        if step is not None:
            if step.opened_itself and self._outermost and not self.session.capture.trace.backward_ends:
                self.fail()  # the last forward raised an exception, which may keep the graph alive
            if not step.opened_itself or not self._is_over(step, at_forward=True):
                return
            self._conclude(step)
        step = self.session.step()
        step.opened_itself = True
        step.__enter__()

    def finish(self) -> None:
        """End a step that a forward opened, even if no optimizer has updated parameters."""
        if (step := self._own_step()) is not None:
            self._miss_optimizer(step, EARLY)
            self._conclude(step)

    def settle(self) -> None:
        """End the open step if the step is over and a forward in this thread opened the step."""
        step = self._own_step()
        if step is not None and step.thread == threading.get_ident() and self._is_over(step):
            self._conclude(step)

    def fail(self) -> None:
        """Record that a forward or an optimizer raised an exception, so that the step is not recorded."""
        self._outermost = None
        if self.step is not None:
            self.step.has_failed = True

    def _own_step(self) -> Step | None:
        step = self.step
        return step if step is not None and step.opened_itself and not is_recomputation() else None

    # ---- is it over? -----------------------------------------------------------------------------

    def _is_over(self, step: Step, *, at_forward: bool = False) -> bool:
        """Return True if a step is over. With ``at_forward``, an update by any optimizer ends the step."""
        trace, gradients = self.session.capture.trace, self.session.gradients
        if step.has_failed or trace.in_backward:  # an exception ended the step
            return True
        if step.updates:
            return at_forward or bool(gradients.born.keys() <= step.updated)
        if not trace.backward_ends:
            return bool(trace.scopes) and all(graph() is None for graph in step.graphs)
        if not gradients.born:
            return not self.session.optimizers and len(trace.backward_ends) >= MOST_UNSEEN
        return bool(gradients.are_cleared)

    def _conclude(self, step: Step) -> None:
        trace, gradients = self.session.capture.trace, self.session.gradients
        is_broken = step.has_failed or trace.in_backward
        is_whole = not is_broken and bool(trace.backward_ends)
        if not is_whole and step.updates and not step.has_failed and not trace.left_alone:
            self.session.notices.no_layer_trained(self.session, step.number)
        if is_whole and not step.updates:
            is_gone = gradients.are_cleared and not gradients.updated
            step.is_skipped = gradients.was_dropped or is_gone
        self.end(step, failed=not is_whole, is_broken=is_broken)

    # ---- the model -------------------------------------------------------------------------------

    def _model_begins(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self.is_inert or is_recomputation() or not torch.is_grad_enabled():
            return
        if self._outermost is None or self._outermost is module:  # the module's last forward has failed
            self._tokens_are_known = False
            self.open_step()
            self._outermost = module
        if self.step is not None and not self._tokens_are_known:  # a wrapper may have other arguments
            tokens = self._count_tokens(*args, **kwargs)
            self._tokens_are_known = tokens is not None
            self.step.seen_tokens += tokens or 0

    def _model_ended(self, module: nn.Module, _args: object, output: object) -> None:
        if module is self._outermost and not (self.is_inert or is_recomputation()):
            self._outermost = None
            has_graph = self.step is None or self.step.graphs or self.session.capture.trace.left_alone
            if module.training and not has_graph:
                self.session.notices.all_frozen(self.session, output)
            self.session.memory.model_ended(output)
            self.session.watch.watch_tail(output)

    def backward_ended(self) -> None:
        """Record the end of a backward pass. In an optimizer's closure, also pause the memory meter."""
        if self.step is not None and self.step.opened_itself:
            self.session.gradients.pass_ended()
            self.session.capture.trace.end_step()  # another micro-batch may follow and end later
            self._miss_optimizer(self.step, MOST_UNSEEN + 1)
        if self.step is not None and self._updating is not None:
            self.session.memory.pause()

    # ---- optimizers ------------------------------------------------------------------------------

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise transfer errors of a step before the optimizer changes the weights.

        If the ``step`` of an optimizer calls the ``step`` of another optimizer, only the inner call is
        recorded.
        """
        if self.is_inert or self.session is None:
            return
        session, step = self.session, self._own_step()
        if not any(map(session.gradients.watches, parameters_of(optimizer))):  # may differ at each update
            if step is not None and session.capture.trace.backward_ends and not session.optimizers:
                session.notices.stranger_updated(optimizer)
            return
        session.optimizers.add(optimizer)
        if step is not None:
            try:
                session.raise_failures()
            except BaseException:
                self.end(step, failed=True)
                raise
        if self.step is not None:
            session.memory.pause()
        self._updating = optimizer, time.perf_counter()
        self._has_closure = callable(kwargs.get("closure", args[1] if len(args) > 1 else None))

    def _optimizer_ended(self, optimizer: Optimizer, *_: object) -> None:
        if self._updating is None or self._updating[0] is not optimizer:
            return
        began, step = self._updating[1], self.step
        self._updating = None
        if step is None:
            self._seconds_between += time.perf_counter() - began
            return
        # An id is valid only while the optimizer holds the parameter, so ids are read at each update.
        updated = list(parameters_of(optimizer))
        step.updates.append((began, time.perf_counter()))
        step.updated |= frozenset(map(id, updated))
        self.session.gradients.also_watch(updated)
        self.session.memory.resume()
        if self._own_step() is not None and self._is_over(step):
            self._conclude(step)

    def _miss_optimizer(self, step: Step, passes: int) -> None:
        session, count = self.session, len(self.session.capture.trace.backward_ends)
        is_updated = step.updates or session.optimizers or session.gradients.updated
        if count >= passes and not (is_updated or step.has_failed):
            session.notices.warn_once("no update", count, category=NoEffectWarning)


class _Hook:
    """A hook on a model or on all optimizers, with only a weak reference to its :class:`Loop`."""

    def __init__(self, loop: weakref.ref[Loop], method: Callable[..., Any]) -> None:
        self._loop, self._method = loop, method

    def __call__(self, *arguments: object) -> Any:
        loop = self._loop()
        return None if loop is None else self._method(loop, *arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, (nullcontext(), "__exit__")  # does nothing, and a file loads without this package


class _ModelHook(_Hook):
    def __call__(self, *arguments: object) -> Any:
        # Code that is being compiled must not trace into the session. During compilation, the first layer
        # opens the step.
        return None if torch.compiler.is_compiling() else super().__call__(*arguments)


def _callers(modules: Sequence[nn.Module], layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules whose forward a program may call: models, and submodules that contain all layers."""
    for module in modules:
        inside = set(module.modules())
        own = {layer for layer in layers if layer in inside and layer is not module}
        if not isinstance(module, nn.ModuleList):  # which is never called
            yield module
        holders = (child for child in module.children() if own and own <= set(child.modules()))
        yield from _callers([child for child in holders if child not in own], list(own))


# Tokens


def token_counter(tokens: Tokens | None) -> Callable[..., int | None]:
    """Return a function that counts the tokens of a micro-batch from the arguments of the model's forward.

    Raises:
        ConfigError: ``tokens`` is neither a positive number nor a function.
    """
    if tokens is None:
        return _count_ids
    if callable(tokens):
        return tokens
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"tokens is {tokens!r}. Pass a number per micro-batch, or a function that counts")
    return lambda *_, **__: tokens


def _count_ids(*args: object, input_ids: object = None, **_: object) -> int | None:
    for given in (input_ids, *args):
        if isinstance(given, torch.Tensor) and given.dtype in {torch.int64, torch.int32}:
            return given.numel()
    return None
