"""The steps of a session: when they begin and end, so that a training loop need not say it.

A step is an update: it opens with the model's first forward that records a graph, and takes in all
micro-batches until the optimizers that hold the model's parameters have made their step. A step is over when

* the optimizers of all parameters that got a gradient have made a step: the step ends there;
* one of them has, and the next forward begins: the step ends before that one;
* the program has dropped its gradients, or set them to zero, without any optimizer: either the loop updates
  the weights itself, or a gradient scaler has skipped the update. Gradients that hooks take away within
  backward, to add them up elsewhere, or that ``torch.autograd.grad`` returns, end no step;
* its graph is gone and backward never came: it was an evaluation, and is forgotten.

A step never ends inside a backward pass, where optimizers that update in hooks make theirs.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tba_offload.capture.site import InstalledHook, copy_without_hooks
from tba_offload.errors import ConfigError, SessionError
from tba_offload.report.log import StepRecord, read_event
from tba_offload.report.timeline import TimelineEvent
from tba_offload.session.notices import MOST_UNSEEN
from tba_offload.states.parameters import parameters_of
from tba_offload.torch_private import is_recomputation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from tba_offload.device.meters import MemoryMeter
    from tba_offload.session.session import Session

Tokens = int | Callable[..., int | None]
"""Tokens of one micro-batch, or a function that tells them from the arguments of the model's forward."""


class Step:
    """One step of a session; see :meth:`Session.step`.

    Attributes:
        loss: Set it to have it in the run log: a number, or a tensor of one element, for which nothing waits.
        tokens: As given to :meth:`Session.step`; may be set inside the block. If it is ``None``, the tokens
            that the model was seen to take count.
        model_flops: As given to :meth:`Session.step`; may be set inside the block.
        record: The :class:`StepRecord`, once the step has ended without an exception. On a device that works
            later than the host, it has the figures that are known by then; :meth:`Session.report` completes
            them.
        is_traced: Whether the user asked to have it recorded over time.
        over_time: The timeline of the step, once it has ended; ``None`` if none was recorded.
        number: Its number in the run log, from 1, once it has begun.
        opened_itself: Whether the first forward opened the step, not :meth:`Session.step`.
        meter: Measures its memory; ``None`` if that is not wanted.
        thread: Number of the thread that opened the step.
        began: Time of its begin, by :func:`time.perf_counter`.
        has_failed: Whether a forward or an optimizer raised an exception in it.
        is_skipped: Whether its gradients were dropped without an update.
        graph_end: Number in autograd's sequence of the output of the layer that ran last.
        graphs: Hooks on outputs of layers that ran: each lives as long as the graph of its layer. A set of
            weak references would have finalizers, in which an interrupt is lost.
        seen_tokens: Tokens of the micro-batches, as seen.
        updates: When optimizers made their steps in it, begin and end.
        updated: Ids of the parameters that optimizers have updated; the optimizers hold these parameters.
        seconds: Duration of the step less that of optimizers in it, by the host's clock; a step that opened
            by itself ends with its last backward pass. Nothing waits for the device at its end.
        optimizer_seconds: Duration of the steps of optimizers since the last step; ``None`` if none was seen.
        had_optimizer: Whether optimizers worked between the step's begin and its end.
        seconds_before: Time that optimizers worked between the last step and this one.
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
        self.graphs: list[weakref.ref[Callable[..., None]]] = []
        self.updates: list[tuple[float, float]] = []
        self.number = self.seen_tokens = 0

    def __enter__(self) -> Self:
        self._loop.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loop.end(self, failed=kind is not None)

    @property
    def timeline(self) -> TimelineEvent:
        """The step over time; its ``write(path)`` makes a picture or a trace of it.

        Raises:
            SessionError: The step was not recorded, has not ended, or was left by an exception.
        """
        if self.over_time is None:
            raise SessionError(
                "this step was not recorded over time: ask for it with session.step(trace=True)"
            )
        return read_event(TimelineEvent, self.over_time)

    # ---- optimizers ------------------------------------------------------------------------------

    def update_times(self, backward_ends: Sequence[float]) -> list[tuple[float, float]]:
        """Return when each optimizer worked; forward and backward of a closure are left out.

        Args:
            backward_ends: When backward passes ended.
        """
        return [
            (max([began, *(end for end in backward_ends if began < end < ended)]), ended)
            for began, ended in self.updates
        ]

    def stop(self, backward_ends: Sequence[float]) -> None:
        """Take the times of the step, which ends now.

        Args:
            backward_ends: When backward passes ended.
        """
        ended = backward_ends[-1] if self.opened_itself and backward_ends else time.perf_counter()
        updates = self.update_times(backward_ends)
        within = sum(max(min(until, ended) - since, 0.0) for since, until in updates)
        self.seconds, self.had_optimizer = ended - self.began - within, within > 0
        if updates or self.seconds_before > 0:
            self.optimizer_seconds = self.seconds_before + sum(until - since for since, until in updates)


class Loop:
    """The step of a session that is open, and what opens and ends it.

    Args:
        session: Does the work at the begin and the end of steps.
        count_tokens: Tells the tokens of a micro-batch; ``None`` if every step is told by hand.

    Attributes:
        step: The step that is open, if one is.
        opens_steps: Whether steps open by themselves.
        is_inert: Whether this is a forked child: locks, threads and descriptors are those of the parent.
        session: As given; ``None`` once it is closed.
    """

    def __init__(self, session: Session, count_tokens: Callable[..., int | None] | None) -> None:
        self.step: Step | None = None
        self.opens_steps, self.is_inert = count_tokens is not None, False
        self.session: Any = session
        self._seconds_between = 0.0  # of optimizers since the last step was open
        self._updating: tuple[Optimizer, float] | None = None  # the optimizer that works, and since when
        self._has_closure = False  # which that optimizer calls
        self._outermost: nn.Module | None = None  # whose forward runs
        self._tokens_are_known = False  # of that forward
        self._handles: list[RemovableHandle] = []
        if count_tokens is not None:
            self._count_tokens = count_tokens
            self._install(list(_callers(session.modules, [layer.module for layer in session.layers])))

    def _install(self, callers: Sequence[nn.Module]) -> None:
        """Hear of the model's forwards and of every optimizer's step."""
        own = weakref.ref(self)  # the hooks are global, and must not keep a model alive
        copy_without_hooks(callers)
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
        """Take all hooks off; no step opens any more."""
        for handle in self._handles:
            handle.remove()
        self.session = None  # in a cycle, the model would stay alive

    # ---- one step --------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Begin a step.

        Raises:
            SessionError: No step can begin here.
        """
        self.check_usable()
        if not step.opened_itself:
            self.finish()
        if self.step is not None:
            raise SessionError("another step of this session is still open")
        self.session.begin_step(step)
        step.seconds_before, self._seconds_between = self._seconds_between, 0.0
        self.step = step

    def end(self, step: Step, *, failed: bool, is_broken: bool = True) -> None:
        """End a step, and record it unless it failed.

        Args:
            step: The step.
            failed: Whether it comes to nothing.
            is_broken: Whether a step that failed is thrown away whole, with the graphs that it has left.
        """
        if self.is_inert:
            return
        self._updating = None  # a whole step within a closure: its optimizer's time is no step's
        try:
            self.session.end_step(step, failed=failed, is_broken=failed and is_broken)
        finally:
            self.step = None
        if not failed:
            step.record = self.session.record_step(step)

    def open_step(self) -> None:
        """Open a step that has begun by itself, unless one is open that goes on."""
        step = self.step
        if self._updating is not None and not self._has_closure:
            self._updating = None  # it raised an exception, so that its end was never heard
            self.fail()
        elif self._updating is not None and step is not None and not step.has_failed:
            self.session.memory.resume()
            return
        if step is not None:
            if step.opened_itself and self._outermost and not self.session.capture.trace.backward_ends:
                self.fail()  # the forward before raised an exception, which may keep its graph alive
            if not step.opened_itself or not self._is_over(step, at_forward=True):
                return
            self._conclude(step)
        step = self.session.step()
        step.opened_itself = True
        step.__enter__()

    def finish(self) -> None:
        """End a step that opened by itself, whether an update came or not: no more of it will come."""
        if (step := self._own_step()) is not None:
            self._conclude(step)

    def settle(self) -> None:
        """End a step that opened by itself and is over; one of another thread is left to that."""
        step = self._own_step()
        if step is not None and step.thread == threading.get_ident() and self._is_over(step):
            self._conclude(step)

    def fail(self) -> None:
        """Record that a forward or an optimizer raised an exception: the step comes to nothing."""
        self._outermost = None
        if self.step is not None:
            self.step.has_failed = True

    def check_usable(self) -> None:
        """Check that steps can be made.

        Raises:
            SessionError: The session is closed, or its process was forked and this is the child.
        """
        if self.is_inert:
            raise SessionError("this session belongs to the parent process; attach the model in the child")
        if self.session is None:
            raise SessionError("this session is closed; attach the model again")

    def _own_step(self) -> Step | None:
        """Return the step that is open, if it has opened by itself and may end here."""
        step = self.step
        return step if step is not None and step.opened_itself and not is_recomputation() else None

    # ---- is it over? -----------------------------------------------------------------------------

    def _is_over(self, step: Step, *, at_forward: bool = False) -> bool:
        """Return True if a step is over; ``at_forward`` of the next micro-batch, an update is enough."""
        trace, gradients = self.session.capture.trace, self.session.gradients
        if step.has_failed or trace.in_backward:  # an exception ended it
            return True
        if step.updates:
            return at_forward or bool(gradients.born.keys() <= step.updated)
        if not trace.backward_ends:
            return bool(trace.scopes) and all(graph() is None for graph in step.graphs)
        if not gradients.born:
            return not self.session.optimizers and len(trace.backward_ends) >= MOST_UNSEEN
        return bool(gradients.are_cleared)

    def _conclude(self, step: Step) -> None:
        """End a step that opened by itself: recorded if its backward has ended, otherwise forgotten."""
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
        """Open a step before the model's forward, unless one is open that goes on; count its tokens."""
        if self.is_inert or is_recomputation() or not torch.is_grad_enabled():
            return
        if self._outermost is None or self._outermost is module:  # the latter has raised an exception
            self._tokens_are_known = False
            self.open_step()
            self._outermost = module
        if self.step is not None and not self._tokens_are_known:  # a wrapper may not know them by name
            tokens = self._count_tokens(*args, **kwargs)
            self._tokens_are_known = tokens is not None
            self.step.seen_tokens += tokens or 0

    def _model_ended(self, module: nn.Module, _args: object, output: object) -> None:
        if module is self._outermost and not (self.is_inert or is_recomputation()):
            self._outermost = None
            self.session.memory.model_ended(output)
            self.session.watch.watch_tail(output)

    def backward_ended(self) -> None:
        """Record that a backward pass is over; what an optimizer does that asked for it is not the step's."""
        if self.step is not None and self.step.opened_itself:
            self.session.gradients.pass_ended()
            self.session.capture.trace.end_step()  # unless another micro-batch follows
        if self.step is not None and self._updating is not None:
            self.session.memory.pause()

    # ---- optimizers ------------------------------------------------------------------------------

    def _optimizer_begins(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Raise what went wrong in a step before its gradients change the weights.

        An optimizer may call another one, or the class that it is derived from: the last to begin counts.
        """
        if self.is_inert or self.session is None:
            return
        if not any(map(self.session.gradients.watches, parameters_of(optimizer))):  # others at each update
            return
        self.session.optimizers.add(optimizer)
        if (step := self._own_step()) is not None:
            try:
                self.session.raise_failures()
            except BaseException:
                self.end(step, failed=True)
                raise
        if self.step is not None:
            self.session.memory.pause()
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
        # Ids are good only as long as the optimizer holds the parameters: they are asked for at each update.
        updated = list(parameters_of(optimizer))
        step.updates.append((began, time.perf_counter()))
        step.updated |= frozenset(map(id, updated))
        self.session.gradients.also_watch(updated)
        self.session.memory.resume()
        if self._own_step() is not None and self._is_over(step):
            self._conclude(step)


class _Hook(InstalledHook):
    """A hook on a model or on all optimizers that keeps no loop alive."""

    def __init__(self, loop: weakref.ref[Loop], method: Callable[..., Any]) -> None:
        self._loop, self._method = loop, method

    def __call__(self, *arguments: object) -> Any:
        loop = self._loop()
        return None if loop is None else self._method(loop, *arguments)


class _ModelHook(_Hook):
    def __call__(self, *arguments: object) -> Any:
        # What is compiled is not traced further than here: the first layer opens the step then.
        return None if torch.compiler.is_compiling() else super().__call__(*arguments)


def _callers(modules: Sequence[nn.Module], layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules by whose forward a micro-batch may enter.

    A model, or what it wraps, down to the layers.
    """
    for module in modules:
        inside = set(module.modules())
        own = {layer for layer in layers if layer in inside and layer is not module}
        if not isinstance(module, nn.ModuleList):  # which is never called
            yield module
        holders = (child for child in module.children() if own and own <= set(child.modules()))
        yield from _callers([child for child in holders if child not in own], list(own))


# Tokens


def token_counter(tokens: Tokens | None) -> Callable[..., int | None]:
    """Return what tells the tokens of a micro-batch from the arguments of the model's forward.

    Raises:
        ConfigError: ``tokens`` is neither a positive number nor a function.
    """
    if tokens is None:
        return _count_ids
    if callable(tokens):
        return tokens
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(f"tokens is {tokens!r}: give the tokens of one micro-batch, or a function")
    return lambda *_, **__: tokens


def _count_ids(*args: object, input_ids: object = None, **_: object) -> int | None:
    """Count the elements of ``input_ids``, or else of the first positional tensor of whole numbers."""
    for given in (input_ids, *args):
        if isinstance(given, torch.Tensor) and given.dtype in {torch.int64, torch.int32}:
            return given.numel()
    return None
