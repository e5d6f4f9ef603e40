"""Finds where the steps of a session begin and end, so that a training loop need not say it.

A step opens with the model's first forward that records a graph, and takes in all micro-batches until the
optimizers that hold the model's parameters have made their step. What tells that a step is over:

* the optimizers of all parameters that got a gradient have made a step: it ends there;
* one of them has, and the next forward begins: it ends before that one;
* its gradients are gone, or zeros again, without any optimizer: either the loop updates the weights by
  itself, or a gradient scaler has skipped the update. It is recorded, in the second case as skipped;
* backward has used all of its graph and summed up no gradient, as ``torch.autograd.grad`` does not, and a
  parameter was changed since it began: the loop updates the weights by itself;
* its graph is gone and backward never came: it was an evaluation, and is forgotten.

A step never ends inside a backward pass, where optimizers that update in hooks make theirs.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tba_offload.layers.checkpoint import is_recomputation
from tba_offload.layers.hooks import HookFreeCopies, InstalledHook
from tba_offload.states.pieces import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from tba_offload.capture.gradients import Gradients
    from tba_offload.session.step import Step
    from tba_offload.session.steps import Steps
    from tba_offload.session.tokens import TokenCounter


class Boundaries:
    """Opens and ends the steps of one session.

    Args:
        steps: The steps.
        gradients: Those of the model.
        layers: The layers.
        modules: The model or its chunks.
        count_tokens: Tells the tokens of a micro-batch; see :func:`token_counter`.
        forward_ended: Is given what the model's forward put out.
        optimizers: Takes up those that are seen to update parameters of the model.
    """

    def __init__(
        self,
        steps: Steps,
        gradients: Gradients,
        layers: Sequence[nn.Module],
        modules: Sequence[nn.Module],
        *,
        count_tokens: TokenCounter,
        forward_ended: Callable[[object], object],
        optimizers: weakref.WeakSet[Optimizer],
    ) -> None:
        self._steps = steps
        self._ongoing = steps.ongoing
        self._gradients = gradients
        self._count_tokens = count_tokens
        self._forward_ended = forward_ended
        self._optimizers = optimizers
        # The optimizers whose step has begun, when that was, and the number of steps until then.
        self._running: list[tuple[Optimizer, float, int]] = []
        self._closures = 0  # of optimizers, that are running
        # How many parameters an optimizer has, and the ids of them if some are the model's.
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[int, frozenset[int]]]
        self._held = weakref.WeakKeyDictionary()
        own = weakref.ref(self)  # the hooks are global, and must not keep a model alive
        callers = list(_callers(modules, layers))
        self._handles: list[RemovableHandle | HookFreeCopies] = [
            HookFreeCopies(callers),
            register_optimizer_step_pre_hook(lambda *call: _call(own, "_optimizer_begins", *call)),
            register_optimizer_step_post_hook(lambda *call: _call(own, "_optimizer_ended", *call)),
        ]
        # Whose forward is running, the outermost first; and whether it has called itself.
        self._forwards: dict[nn.Module, bool] = {}
        self._tokens_are_known = False  # of the outermost forward
        for module in callers:
            before, after = _ModelHook(own, Boundaries.model_begins), _ModelHook(own, Boundaries.model_ended)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    # ---- forward ---------------------------------------------------------------------------------

    def model_begins(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record that the model's forward begins: opens a step unless one is open that goes on."""
        if self._ongoing.is_inert or is_recomputation():
            return
        is_running = module in self._forwards
        if is_running and _calls_itself(module):
            self._forwards[module] = True
            return
        if not torch.is_grad_enabled():
            return
        with self._ongoing.lock:
            if is_running:
                self._forwards.clear()  # it raised an exception, so that its end was never heard
                self._ongoing.fail()
            if not self._forwards:
                self._tokens_are_known = False
                self.open_step()
            self._forwards[module] = False
        self._count(module, args, kwargs)

    def _count(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Count the tokens of a micro-batch, which a wrapper around the model may not know by name."""
        step = self._ongoing.step
        if step is None or self._tokens_are_known:
            return
        tokens = self._count_tokens(module, args, kwargs)
        if tokens is not None:
            self._tokens_are_known = True
            step.saw_tokens(tokens)

    def model_ended(self, module: nn.Module, _args: object, output: object) -> None:
        """Record that the model's forward has ended."""
        has_called_itself = self._forwards.get(module)
        if has_called_itself is None or is_recomputation() or (has_called_itself and _calls_itself(module)):
            return
        while self._forwards.popitem()[0] is not module:
            pass  # it raised an exception, so that its end was never heard
        if not self._forwards and not self._ongoing.is_inert:
            self._forward_ended(output)

    def open_step(self) -> None:
        """Open a step that has begun by itself, unless one is open that goes on."""
        with self._ongoing.lock:
            step = self._steps.open_step()
            if not self._closures:
                if self._running:  # it raised an exception, so that its end was never heard
                    self._running.clear()
                    self._ongoing.fail()
                    if step is not None:
                        step.memory.resume()
                if step is not None and step.opened_itself and (step.updates or self._is_over(step)):
                    self.end_step(step)
                    step = None
            if step is None:
                self._steps.open_by_itself()
            elif self._closures:
                step.memory.resume()

    def backward_ended(self) -> None:
        """Record that a backward pass is over; what an optimizer does that asked for it is not the step's."""
        step = self._ongoing.step
        if step is None:
            return
        if step.opened_itself:
            self._steps.trace.end_step()  # unless another micro-batch follows
        if self._closures:
            step.memory.pause()

    # ---- optimizers ------------------------------------------------------------------------------

    def _optimizer_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._ongoing.is_inert or not self._held_by(optimizer):
            return None
        with self._ongoing.lock:
            step = self._steps.open_step()
            if step is not None:
                if not is_recomputation():
                    self._raise_failures(step)
                step.memory.pause()
            self._running.append((optimizer, time.perf_counter(), self._ongoing.number))
        return self._with_closure(args, kwargs)

    def _with_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of an optimizer's step with a closure that is noticed; None if it has none."""
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

    def _raise_failures(self, step: Step) -> None:
        """Raise what went wrong in a step that opened by itself, before its gradients change the weights."""
        if not step.opened_itself:
            return
        try:
            self._steps.raise_failures()
        except BaseException:
            self._steps.forget(step)
            raise

    def _optimizer_ended(self, optimizer: Optimizer, *_: object) -> None:
        if not self._running or self._running[-1][0] is not optimizer:
            return
        with self._ongoing.lock:
            began, number = self._running.pop()[1:]
            self._optimizers.add(optimizer)
            step = self._steps.open_step()
            if self._running:  # a class may call the step of the one that it is derived from
                return
            if step is None:
                if number == self._ongoing.number:  # else a closure has made a whole step
                    self._ongoing.updated_between(time.perf_counter() - began)
                return
            # With optimizers that can do so themselves a scaler leaves it to their step to skip the update.
            overflow = getattr(optimizer, "found_inf", None)
            if isinstance(overflow, torch.Tensor) and not overflow.is_cpu:
                overflowed: bool | torch.Tensor = overflow.detach().clone()  # scalers add to theirs in place
            else:
                overflowed = bool(overflow)
            step.updates.add(
                began,
                time.perf_counter(),
                parameters=self._held_by(optimizer),
                overflowed=overflowed,
            )
            self._gradients.also_watch(parameters_of(optimizer))
            step.memory.resume()
            if step.opened_itself and self._all_updated(step) and not is_recomputation():
                self.end_step(step)

    def _all_updated(self, step: Step) -> bool:
        """Whether the optimizers of all parameters that got a gradient have made their step."""
        return bool(step.updates) and self._gradients.born_within(step.updates.parameters)

    def _held_by(self, optimizer: Optimizer) -> frozenset[int]:
        """Ids of an optimizer's parameters if some are the model's, otherwise nothing."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)  # groups may be added
        known = self._held.get(optimizer)
        if known is None or known[0] != count:
            held = frozenset(map(id, parameters_of(optimizer)))
            if held.isdisjoint(map(id, self._gradients.parameters())):
                held = frozenset()
            known = self._held[optimizer] = count, held
        return known[1]

    # ---- ends ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End a step that opened by itself and is over; one that another thread works on is left to that."""
        if not self._ongoing.lock.acquire(blocking=False):
            return
        try:
            step = self._steps.open_step()
            if step is None or not step.opened_itself or is_recomputation() or self._works_elsewhere():
                return
            if self._is_over(step):
                self.end_step(step)
        finally:
            self._ongoing.lock.release()

    def _works_elsewhere(self) -> bool:
        """Whether another thread is in the midst of the step that is open."""
        trace = self._steps.trace
        is_at_rest = bool(trace.backward_ends) and not trace.in_backward
        is_called = self._forwards or self._running or self._closures
        return self._ongoing.is_of_another_thread and (bool(is_called) or not is_at_rest)

    def finish(self) -> None:
        """End a step that opened by itself, whether an update came or not: no more of it will come."""
        with self._ongoing.lock:
            step = self._steps.open_step()
            if step is not None and step.opened_itself and not is_recomputation():
                self.end_step(step)

    def end_step(self, step: Step) -> None:
        """End a step that opened by itself: recorded if its backward has ended, otherwise forgotten."""
        trace = self._steps.trace
        if step.state.failed or trace.in_backward or not trace.backward_ends:
            self._steps.forget(step)
            return
        if self._is_skipped(step):
            step.state.skip()
        step.__exit__(None, None, None)

    def _is_skipped(self, step: Step) -> bool:
        """Whether nothing came of the gradients."""
        if step.updates:
            return step.updates.overflowed
        gradients = self._gradients
        return gradients.was_dropped or (gradients.are_cleared and not gradients.updated)

    def _is_over(self, step: Step) -> bool:
        trace = self._steps.trace
        if step.state.failed or trace.in_backward:
            return True  # an exception ended it
        if not trace.backward_ends:
            return bool(trace.scopes) and not step.graphs
        gradients = self._gradients
        if gradients.went_elsewhere:
            if trace.note_gone():
                gradients.count()
            return trace.is_used_up or not step.graphs
        return self._all_updated(step) or gradients.are_cleared


_CALL = nn.Module._call_impl.__code__
"""Code that runs the hooks of a module around its forward."""


class _ModelHook(InstalledHook):
    """A hook of the model's forward."""

    def __init__(self, boundaries: weakref.ref[Boundaries], hear: Callable[..., None]) -> None:
        self._boundaries = boundaries
        self._hear = hear

    def __call__(self, *arguments: object) -> None:
        if torch.compiler.is_compiling():
            return  # the first layer opens the step then
        boundaries = self._boundaries()
        if boundaries is not None:
            self._hear(boundaries, *arguments)


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


def _call(own: weakref.ref[Boundaries], method: str, *arguments: object) -> Any:
    boundaries = own()
    return None if boundaries is None else getattr(boundaries, method)(*arguments)
