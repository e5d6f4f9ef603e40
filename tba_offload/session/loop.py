"""When the steps of a session begin and end, so that a training loop need not say it.

A step is an update: it opens with the model's first forward that records a graph, and takes in all
micro-batches until the optimizers that hold the model's parameters have made their step. A step is over when

* the optimizers of all parameters that got a gradient have made a step: the step ends there;
* one of them has, and the next forward begins: the step ends before that one;
* the program has dropped its gradients, or set them to zero, without any optimizer: either the loop updates
  the weights itself, or a gradient scaler has skipped the update. Gradients that hooks take away within
  backward, to add them up elsewhere, end no step;
* backward has used all of its graph and summed up no gradient, as ``torch.autograd.grad`` does not, and a
  parameter was changed since the step began: the loop updates the weights itself;
* its graph is gone and backward never came: it was an evaluation, and is forgotten.

A step never ends inside a backward pass, where optimizers that update in hooks make theirs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tba_offload.capture.site import HookFreeCopies, InstalledHook
from tba_offload.errors import ConfigError, SessionError
from tba_offload.layers.graph import is_recomputation
from tba_offload.states.parameters import parameters_of
from tba_offload.store import interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from tba_offload.device import Device
    from tba_offload.session.session import Session
    from tba_offload.session.step import Step

Tokens = int | Callable[..., int | None]
"""Tokens of one micro-batch, or a function that tells them from the arguments of the model's forward."""

TokenCounter = Callable[..., int | None]
"""Tells the tokens of a micro-batch from the model, and the tuple and the dict of its forward's arguments."""

_MOST_PASSES = 128
"""Backward passes of one step whose gradients hooks take, as long as no optimizer was seen to use them."""


class Loop:
    """The step of a session that is open, and what opens and ends it.

    Args:
        session: Does the work at the begin and the end of steps.
        optimizers: Takes up the optimizers that are seen to update the model.

    Attributes:
        step: The step that is open, if one is.
        number: How many steps have ended well.
        opens_steps: Whether steps open by themselves.
        is_closed: Whether the session was closed.
        is_inert: Whether this is a forked child: locks, threads and descriptors are those of the parent.
        session: As given, until it is closed.
    """

    def __init__(self, session: Session, optimizers: weakref.WeakSet[Optimizer]) -> None:
        self.step: Step | None = None
        self.number = 0
        self.opens_steps = self.is_closed = self.is_inert = False
        self.device: Device = session.device
        self.session: Any = session
        self._optimizers = optimizers
        self._has_own = bool(optimizers)  # whether an optimizer of the model's parameters was seen
        self._most_passes = _MOST_PASSES
        self._seconds_between = 0.0  # of optimizers since the last step was open
        # The optimizers whose step has begun, when that was, and the number of steps until then.
        self._running: list[tuple[Optimizer, float, int]] = []
        self._closures = 0  # of optimizers, that are running
        # The forwards that run, outermost first, and whether each has called itself.
        self._forwards: dict[nn.Module, bool] = {}
        self._tokens_are_known = False  # of the outermost forward
        self._count_tokens: TokenCounter = _no_tokens
        self._handles: list[RemovableHandle | HookFreeCopies] = []
        _all.add(self)

    def watch(self, modules: Sequence[nn.Module], layers: Sequence[nn.Module], count: TokenCounter) -> None:
        """Have steps open and end by themselves.

        Args:
            modules: The model or its chunks.
            layers: The layers.
            count: Tells the tokens of a micro-batch; see :func:`token_counter`.
        """
        self.opens_steps, self._count_tokens = True, count
        own = weakref.ref(self)  # the hooks are global, and must not keep a model alive
        callers = list(_callers(modules, layers))
        self._handles += [
            HookFreeCopies(callers),
            register_optimizer_step_pre_hook(_Hook(own, Loop._optimizer_begins)),
            register_optimizer_step_post_hook(_Hook(own, Loop._optimizer_ended)),
        ]
        for module in callers:
            before, after = _ModelHook(own, Loop._model_begins), _ModelHook(own, Loop._model_ended)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
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
        try:
            interrupts.put_up(step)
            self.check_usable()
            if not step.opened_itself:
                self.finish()
            self._check_alone()
            self.session.begin_step(step)
        except BaseException:
            interrupts.take_down(step)
            raise
        step.seconds_before, self._seconds_between = self._seconds_between, 0.0
        self.step = step

    def end(self, step: Step, *, failed: bool) -> None:
        """End a step, and record it unless it failed."""
        step.is_left = True
        if self.is_inert:
            return
        try:
            self.session.end_step(step, failed=failed)
        finally:
            self.step = None
            interrupts.take_down(step)
        if not failed:
            self.number += 1
            step.record = self.session.record_step(step, self.number)

    def finish(self) -> None:
        """End a step that opened by itself, whether an update came or not: no more of it will come."""
        step = self._left_behind()
        if step is not None and step.opened_itself and not is_recomputation():
            self._conclude(step)

    def settle(self) -> None:
        """End a step that opened by itself and is over; one of another thread is left to that."""
        step = self._left_behind()
        if step is None or not step.opened_itself or is_recomputation():
            return
        if step.thread == threading.get_ident() and self._is_over(step):
            self._conclude(step)

    def fail(self) -> None:
        """Record that a forward or an optimizer raised an exception: the step comes to nothing."""
        if self.step is not None:
            self.step.has_failed = True

    def become_inert(self) -> None:
        """Record that the process was forked, and this is the child."""
        self.is_inert, self.step = True, None

    def check_usable(self) -> None:
        """Check that steps can be made.

        Raises:
            SessionError: The session is closed, or its process was forked and this is the child.
        """
        if self.is_inert:
            raise SessionError("this session belongs to the parent process; attach the model in the child")
        if self.is_closed:
            raise SessionError("this session is closed; attach the model again")

    def _left_behind(self) -> Step | None:
        """Return the step that is open; one whose end was interrupted is ended now."""
        if self.step is not None and self.step.is_left:
            self.step.end(failed=True)
        return self.step

    def _check_alone(self) -> None:
        if self._left_behind() is not None:
            raise SessionError("another step of this session is still open")

    def open_step(self) -> None:
        """Open a step that has begun by itself, unless one is open that goes on."""
        step = self._left_behind()
        if self._closures:
            if step is not None:
                self.session.memory.resume()
                return
        elif step is not None:
            if self._running:  # it raised an exception, so that its end was never heard
                self._running.clear()
                self.fail()
                self.session.memory.resume()
            if not step.opened_itself or not (step.has_updates or self._is_over(step)):
                return
            self._conclude(step)
        else:
            self._running.clear()
        opened = self.session.step()
        opened.opened_itself = True
        opened.__enter__()

    # ---- is it over? -----------------------------------------------------------------------------

    def _is_over(self, step: Step) -> bool:
        trace, gradients = self.session.capture.trace, self.session.gradients
        if step.has_failed or trace.in_backward:
            return True  # an exception ended it
        if step.has_updates:
            return bool(gradients.born_within(step.updated))
        if not trace.backward_ends:
            return bool(trace.scopes) and not step.has_graphs
        if gradients.went_elsewhere:
            if trace.note_gone():
                gradients.count()
            return trace.is_used_up or not step.has_graphs
        if gradients.were_taken and not self._has_own and len(trace.backward_ends) >= self._most_passes:
            self._most_passes = 1  # no update is ever going to be seen
            self.session.notices.no_update()
            return True
        return bool(gradients.are_cleared)

    def _conclude(self, step: Step) -> None:
        """End a step that opened by itself: recorded if its backward has ended, otherwise forgotten."""
        trace, gradients = self.session.capture.trace, self.session.gradients
        if step.has_failed or trace.in_backward or not trace.backward_ends:
            if step.has_updates and not step.has_failed and not trace.left_alone:
                self.session.notices.no_layer_trained(self.session, self.number + 1)
            step.end(failed=True)
            return
        if step.has_updates:
            step.is_skipped = step.overflowed
        else:
            is_gone = gradients.are_cleared or (gradients.were_taken and not gradients.went_elsewhere)
            step.is_skipped = gradients.was_dropped or (is_gone and not gradients.updated)
        step.end(failed=False)

    # ---- the model -------------------------------------------------------------------------------

    def _model_begins(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Open a step before the model's forward, unless one is open that goes on; count its tokens."""
        if torch.compiler.is_compiling() or self.is_inert or is_recomputation():
            return  # of a compiled model the first layer opens the step
        is_running = module in self._forwards
        if is_running and _calls_itself(module):
            self._forwards[module] = True
            return
        if not torch.is_grad_enabled():
            return
        if is_running:
            self._forwards.clear()  # it raised an exception, so that its end was never heard
            self.fail()
        if not self._forwards:
            self._tokens_are_known = False
            self.open_step()
        self._forwards[module] = False
        if self.step is None or self._tokens_are_known:
            return
        tokens = self._count_tokens(module, args, kwargs)  # a wrapper may not know them by name
        if tokens is not None:
            self._tokens_are_known = True
            self.step.saw_tokens(tokens)

    def _model_ended(self, module: nn.Module, _args: object, output: object) -> None:
        has_called_itself = self._forwards.get(module)
        if has_called_itself is None or torch.compiler.is_compiling() or is_recomputation():
            return
        if has_called_itself and _calls_itself(module):
            return
        while self._forwards.popitem()[0] is not module:
            pass  # it raised an exception, so that its end was never heard
        if not self._forwards and not self.is_inert:
            self.session.forward_ended(output)

    def backward_ended(self) -> None:
        """Record that a backward pass is over; what an optimizer does that asked for it is not the step's."""
        step = self.step
        if step is None:
            return
        if step.opened_itself:
            self.session.gradients.pass_ended()
            self.session.capture.trace.end_step()  # unless another micro-batch follows
        if self._closures:
            self.session.memory.pause()

    # ---- optimizers ------------------------------------------------------------------------------

    def _parameters_of(self, optimizer: Optimizer) -> frozenset[int] | None:
        """Return the ids of the parameters that an optimizer updates in this step.

        Ids are good only as long as the optimizer holds the parameters: they are asked for at each update.

        Returns:
            ``None`` for the optimizer of something else. One of copies counts where hooks have taken the
            gradients in backward and no other was seen: of these copies no parameter is the model's.
        """
        parameters = list(parameters_of(optimizer))
        if any(map(self.session.gradients.watches, parameters)):
            self._has_own = True
            return frozenset(map(id, parameters))
        is_of_copies = self.step is not None and not self._has_own and self.session.gradients.were_taken
        return frozenset() if is_of_copies else None

    def _optimizer_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raise what went wrong in a step before its gradients change the weights; notice a closure."""
        if self.is_inert or self.session is None or self._parameters_of(optimizer) is None:
            return None
        step = self._left_behind()
        if step is not None:
            if step.opened_itself and not is_recomputation():
                try:
                    self.session.raise_failures()
                except BaseException:
                    step.end(failed=True)
                    raise
            self.session.memory.pause()
        self._running.append((optimizer, time.perf_counter(), self.number))
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._noticed(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._noticed(args[1]), *args[2:]), kwargs
        return None

    def _noticed(self, closure: Callable[[], object]) -> Callable[[], object]:
        @functools.wraps(closure)
        def run() -> object:
            self._closures += 1
            try:
                return closure()
            finally:
                self._closures -= 1

        return run

    def _optimizer_ended(self, optimizer: Optimizer, *_: object) -> None:
        if not self._running or self._running[-1][0] is not optimizer:
            return
        began, number = self._running.pop()[1:]
        self._optimizers.add(optimizer)
        step = self._left_behind()
        if self._running:  # a class may call the step of the one that it is derived from
            return
        if step is None:
            if number == self.number:  # else a closure has made a whole step
                self._seconds_between += time.perf_counter() - began
            return
        # With optimizers that can do so themselves a scaler leaves it to their step to skip the update.
        overflow = getattr(optimizer, "found_inf", None)
        if isinstance(overflow, torch.Tensor) and not overflow.is_cpu:
            overflowed: bool | torch.Tensor = overflow.detach().clone()  # scalers add to theirs in place
        else:
            overflowed = bool(overflow)
        updated = self._parameters_of(optimizer) or frozenset()
        step.add_update(began, time.perf_counter(), updated, overflowed=overflowed)
        if updated:
            self.session.gradients.also_watch(parameters_of(optimizer))
        self.session.memory.resume()
        if step.opened_itself and not is_recomputation() and self._is_over(step):
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


_CALL = nn.Module._call_impl.__code__
"""Code that runs the hooks of a module around its forward."""


def _calls_itself(module: nn.Module) -> bool:
    """Whether the call of a module that runs now lies in another call of it."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is module:
            calls += 1
        frame = frame.f_back
    return calls > 1


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


_all: weakref.WeakSet[Loop] = weakref.WeakSet()


def steps_beside(loop: Loop) -> Iterator[Loop]:
    """Yield the loops of other sessions on the same device that have a step open."""
    for other in list(_all):
        if (
            other is not loop
            and not other.is_closed
            and other.device.torch_device == loop.device.torch_device
        ):
            other.settle()
            if other.step is not None:
                yield other


# Tokens


def token_counter(tokens: Tokens | None) -> TokenCounter:
    """Return what tells the tokens of a micro-batch from the model and the arguments of its forward.

    Raises:
        ConfigError: ``tokens`` is neither a positive number nor a function.
    """
    if tokens is None:
        places: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        return functools.partial(_input_ids, places)
    if callable(tokens):
        return lambda _module, args, kwargs: tokens(*args, **kwargs)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"tokens is {tokens!r}: give the tokens of one micro-batch, or a function that tells them"
        )
    return lambda *_: tokens


def _input_ids(
    places: weakref.WeakKeyDictionary[nn.Module, int],
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> int | None:
    """Count the elements of ``input_ids``, given by name or by position; ``None`` without such arguments."""
    found = kwargs.get("input_ids")
    if found is None and args:
        if module not in places:  # asked once: the signature takes longer than a small layer
            names = list(inspect.signature(module.forward).parameters)
            places[module] = names.index("input_ids") if "input_ids" in names else len(names)
        found = args[places[module]] if places[module] < len(args) else None
    return found.numel() if isinstance(found, torch.Tensor) else None


def _no_tokens(*_: object) -> int | None:
    """Count no tokens, where steps are told by hand."""
    return None
