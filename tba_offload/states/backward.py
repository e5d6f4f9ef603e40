"""Optimizer updates during backward.

A sub-group is updated as soon as its gradients are final. After the update, the gradients are freed.

Gradients are final in the last backward pass before ``optimizer.step()``. When this backward pass returns,
all parameters have their new values. ``step()`` only checks that gradients, settings, states and parameters
have not changed after backward. Reading a freed gradient raises an error.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

from tba_offload.errors import SessionError, log_warning
from tba_offload.recompute.digest import digest
from tba_offload.states.away import FreedGradient
from tba_offload.states.parameters import distributed, local, parameters_of, spec_of
from tba_offload.states.updates import Updates
from tba_offload.torch_private import call_after_backward, current_backward, keeps_graph, not_traced, users_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    from tba_offload.states.groups import SubGroup
    from tba_offload.states.updates import StatesRecord

_CLOSELY = 3
"""Number of steps, from the first step, in which ``step()`` checks all bytes of the parameters.

Later, only steps 4, 8, 16 and so on check all bytes.
"""

_HALFWAY = "backward() failed halfway through the updates. Load a checkpoint of the model and the optimizer"


class BackwardUpdates(Updates):
    """Updates of the parameters of one optimizer in the last backward pass before each step.

    Args:
        arguments: Arguments of :class:`Updates`.
    """

    _is_early = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._last = self.homes.device.event()
        self._handles: dict[torch.Tensor, RemovableHandle] = {}
        self._references: dict[torch.Tensor, int] = {}
        self._freed: dict[torch.Tensor, torch.Tensor] = {}
        self._steps = 0
        self._task: int | None = None
        self._forget()
        message = "states.when is 'backward': parameters have their new values when backward() returns"
        log_warning(__name__, message)

    def _forget(self) -> None:
        self._passes = 0
        self._is_updating = False
        self._made: StatesRecord | None = None

    def loaded(self) -> None:
        """Offload the states of a loaded checkpoint, and forget earlier backward passes."""
        self._forget()
        super().loaded()

    def follow(self) -> None:
        """Apply the program's changes of parameters and states, and register hooks on trained parameters."""
        super().follow()
        wanted = {each for each in parameters_of(self.optimizer) if each.is_leaf and each.requires_grad}
        for parameter in self._handles.keys() - wanted:
            self._handles.pop(parameter).remove()
        for parameter in wanted - self._handles.keys():
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles[parameter] = register(_weakly(WeakMethod(self._gradient_came)))

    def close(self) -> None:
        """Remove all hooks, and end the helper threads."""
        super().close()
        while self._handles:
            self._handles.popitem()[1].remove()
        if self._made is not None:
            log_warning(__name__, "backward() updated parameters, and no optimizer.step() followed")

    # ---- backward --------------------------------------------------------------------------------

    def _gradient_came(self, parameter: torch.Tensor) -> None:
        self._wait()
        task = current_backward()
        if task != self._task:
            self._task = task
            self._begin_pass()
        if self._open:
            with self._guarded():
                self._read_ahead()
            self._note_later_use(parameter)
        holding = [group for group, missing in self._open.items() if parameter in missing]
        for group in holding:  # several sub-groups, if the parameter is cut into slices
            self._open[group].discard(parameter)
            if self._open[group] or not self._read_later.isdisjoint(group.parameters):
                continue  # parameters that a later node uses are updated at the end
            self._is_updating = True
            self._done.append(group)
            with self._guarded():
                self.update(group, {})
            del self._open[group]
        self.entries.show_slices()
        self._free(each for group in holding if group not in self._open for each in group.parameters)
        self._last = self.homes.device.event()

    def _wait(self) -> None:
        """Make the current stream wait for the work of the previous gradient hook or optimizer step.

        A hook runs on the stream that computed or, with FSDP2, reduced the gradient. The optimizer's step
        runs on the program's stream.
        """
        self._last.wait(self.homes.device.stream())  # the current device's stream

    def _begin_pass(self) -> None:
        if self._is_updating:
            if self._made is None:
                raise SessionError(_HALFWAY)
            why = f"another backward pass ran after the update: states.micro_batches is {self.micro_batches}"
            remedy = "Set states.micro_batches to the number of backward passes per step, or checkpoint with"
            raise SessionError(f"{why}. {remedy} use_reentrant=False, or set states.when to 'step'")
        self._passes += 1
        self._done: list[SubGroup] = []
        self._open: dict[SubGroup, set[torch.Tensor]] = {}
        if self._passes < self.micro_batches:
            with self._guarded():
                self._read_ahead()
            return
        call_after_backward(partial(call_after_backward, self._pass_ends))  # run after FSDP2's own callback
        self._freed.clear()
        self._read_later: set[torch.Tensor] = set()
        self._keeps_graph = keeps_graph()
        if not self._keeps_graph:  # a second backward may read the parameters: update at the end
            self.follow()
            self._open = {group: self._handles.keys() & set(group.parameters) for group in self.groups}

    def _note_later_use(self, parameter: torch.Tensor) -> None:
        """Record whether an autograd node that runs later still uses the memory of a parameter.

        A later node would read the new value, for example in another layer that uses the weight through
        ``.data``. If more tensors use the memory than at the end of earlier passes, a later node still needs
        the parameter. In the first pass, this method assumes that a later node needs every parameter.
        """
        if _references_to(parameter) > self._references.get(parameter, 0):
            self._read_later.add(parameter)

    def _free(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                name = f"the gradient of {self.groups.name_of(parameter)}"
                own: torch.Tensor = local(parameter.grad)
                stride = torch.empty(own.shape, device="meta").stride()  # a sparse gradient has no strides
                freed = FreedGradient(own.shape, stride, own.dtype, own.device, name)
                parameter.grad = self._freed[parameter] = distributed(freed, spec_of(parameter.grad))

    def _pass_ends(self) -> None:
        """Update the remaining parameters at the end of a backward pass.

        A remaining parameter has no states yet, is used by a later node, or belongs to a sub-group that did
        not get all gradients.
        """
        self._wait()
        self._is_updating, self._open = True, {}
        self._made = self._make({}, done=self._done)
        self._free(each for each in parameters_of(self.optimizer) if each not in self._freed)
        for each in () if self._keeps_graph else self._freed:
            now = _references_to(each)
            self._references[each] = min(self._references.get(each, now), now)
        self._steps += 1
        self._settings, self._values = self._settings_now(), self._values_now()
        self._last = self.homes.device.event()

    # ---- the step --------------------------------------------------------------------------------

    def step(self, options: Mapping[str, Any]) -> StatesRecord:
        """Return the record of the update that backward has made.

        If a step has fewer backward passes than ``states.micro_batches``, such as the last step of an epoch,
        this method makes the whole update.

        Args:
            options: Further arguments of the optimizer's ``step``.

        Raises:
            SessionError: A gradient, setting, state or parameter has changed after backward, ``step`` is
                called twice after one backward pass, or backward failed during its updates.
            TransferError: States cannot be read.
        """
        made, parameters = self._made, parameters_of(self.optimizer)
        if made is None and self._is_updating:
            raise SessionError(_HALFWAY)
        if made is None and any(type(local(each.grad)) is FreedGradient for each in parameters):
            why = "optimizer.step() was called twice without a backward pass between the calls"
            raise SessionError(f"{why}. Call step() once after backward(), or set states.when to 'step'")
        self._wait()
        what = None if made is None else self._what_differs(options)
        self._last = self.homes.device.event()
        if what is not None:
            why = f"{what} was changed after backward(), which had already updated the parameters"
            raise SessionError(f"{why}. Change it after optimizer.step(), or set states.when to 'step'")
        self._forget()
        return made or super().step(options)

    def _what_differs(self, options: Mapping[str, Any]) -> str | None:
        if any(each.grad is not self._freed.get(each) for each in parameters_of(self.optimizer)):
            return "a gradient"
        if any(options.values()) or self._settings != self._settings_now():
            return "a setting of the optimizer"
        if not all(map(self.entries.is_current, self.groups)):
            return "a state of the optimizer"
        return None if self._values == self._values_now() else "the value of a parameter"

    def _settings_now(self) -> str:
        groups = [group.items() for group in self.optimizer.param_groups]
        settings = [(key, each) for group in groups for key, each in group if not key.startswith("param")]
        return repr([(key, each.tolist() if torch.is_tensor(each) else each) for key, each in settings])

    def _values_now(self) -> tuple[list[int], list[list[int]]]:
        """Return the versions of the parameters and, in some steps, digests of their bytes.

        Digests also show writes through ``.data``, which do not change the version.
        """
        closely = self._steps <= _CLOSELY or not self._steps & (self._steps - 1)
        values = (local(each.detach()) for each in (self._freed if closely else ()))
        return [each._version for each in self._freed], list(map(digest, values))


def _weakly(came: WeakMethod[Any]) -> Any:
    """Return a parameter hook that does not keep the optimizer alive."""

    def hook(parameter: torch.Tensor) -> None:
        if (method := came()) is not None:
            method(parameter)

    return not_traced(hook, nor_what_it_calls=True)


def _references_to(parameter: torch.Tensor) -> int:
    return users_of(local(parameter).untyped_storage())
