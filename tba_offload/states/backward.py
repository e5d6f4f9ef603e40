"""Updates in backward: a sub-group is updated as soon as its gradients are final, and these are freed.

Gradients are final in the last backward pass before ``optimizer.step()``. When that pass returns, all
parameters have their new values, and ``step()`` only checks that nothing came in between that a plain step
would have used. Whatever asks for a freed gradient gets an error.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

from tba_offload.errors import SessionError
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
"""First steps in which all bytes of parameters are compared, as in those whose number is a power of two."""

_HALFWAY = "backward ended halfway through its updates. Load a checkpoint of the model and the optimizer"

logger = logging.getLogger(__name__)


class BackwardUpdates(Updates):
    """Updates the parameters of one optimizer in the last backward pass before each of its steps.

    Args:
        arguments: As for :class:`Updates`.
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
        logger.warning(
            "states.when: backward: parameters have their new values when backward() returns; what reads "
            "them before optimizer.step() reads those"
        )

    def _forget(self) -> None:
        """Forget what was updated since the last step: a checkpoint was loaded, or the step came."""
        self._passes = 0
        self._is_updating = False
        self._made: StatesRecord | None = None

    def loaded(self) -> None:
        """Take a checkpoint that was loaded, and forget what backward has done."""
        self._forget()
        super().loaded()

    def follow(self) -> None:
        """Follow what was done to the optimizer, and have hooks on the parameters that it trains now."""
        super().follow()
        wanted = {each for each in parameters_of(self.optimizer) if each.is_leaf and each.requires_grad}
        for parameter in self._handles.keys() - wanted:
            self._handles.pop(parameter).remove()
        for parameter in wanted - self._handles.keys():
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles[parameter] = register(_weakly(WeakMethod(self._gradient_came)))

    def close(self) -> None:
        """Take all hooks off, and end what runs beside the training thread."""
        super().close()
        while self._handles:
            self._handles.popitem()[1].remove()
        if self._made is not None:
            logger.warning("parameters are updated by a backward pass that no optimizer.step() has followed")

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
        for group in holding:  # several, if they have slices of it
            self._open[group].discard(parameter)
            if self._open[group] or not self._read_later.isdisjoint(group.parameters):
                continue  # the latter are updated at the end
            self._is_updating = True
            self._done.append(group)
            with self._guarded():
                self.update(group, {})
            del self._open[group]
        self.entries.show_slices()
        self._free(each for group in holding if group not in self._open for each in group.parameters)
        self._last = self.homes.device.event()

    def _wait(self) -> None:
        """Have the work that follows come after that of the hook before, whatever their streams.

        Hooks of autograd are called on the stream that made a gradient, FSDP2's on the one that reduced it;
        an optimizer's step has another.
        """
        self._last.wait(self.homes.device.stream())  # without it, that of the current device

    def _begin_pass(self) -> None:
        """Count a backward pass, and let updates begin if it is the last before the step.

        Raises:
            SessionError: Parameters were updated in a pass before, and no step came.
        """
        if self._is_updating:
            raise SessionError(
                "another backward pass came after that which updated the parameters, before step(): "
                f"states.micro_batches is {self.micro_batches}. Set it to the number of passes in a "
                "step, set use_reentrant=False for torch's checkpoints, or set states.when to step"
                if self._made is not None
                else _HALFWAY
            )
        self._passes += 1
        self._done: list[SubGroup] = []
        self._open: dict[SubGroup, set[torch.Tensor]] = {}
        if self._passes < self.micro_batches:
            with self._guarded():
                self._read_ahead()
            return
        call_after_backward(partial(call_after_backward, self._pass_ends))  # after what FSDP2 does there
        self._freed.clear()
        self._read_later: set[torch.Tensor] = set()
        self._keeps_graph = keeps_graph()
        if not self._keeps_graph:  # else it reads parameters again, so that all are updated at the end
            self.follow()
            self._open = {group: self._handles.keys() & set(group.parameters) for group in self.groups}

    def _note_later_use(self, parameter: torch.Tensor) -> None:
        """Note whether something else holds the memory of a parameter, as a later node of the graph.

        Nodes that had a part in its gradient have let go of it by now. One that had none, as of a layer that
        uses the weight of another by ``.data``, would read the new value. In the first pass of a parameter
        nothing is known yet: what it has at the end of a pass, when all have let go, is usual.
        """
        if _references_to(parameter) > self._references.get(parameter, 0):
            self._read_later.add(parameter)

    def _free(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                name = f"the gradient of {self.groups.name_of(parameter)}"
                own: torch.Tensor = local(parameter.grad)
                stride = torch.empty(own.shape, device="meta").stride()  # a sparse one has none
                freed = FreedGradient(own.shape, stride, own.dtype, own.device, name)
                parameter.grad = self._freed[parameter] = distributed(freed, spec_of(parameter.grad))

    def _pass_ends(self) -> None:
        """Update what was not updated yet: parameters without states, and those of incomplete sub-groups."""
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

    def clearing(self) -> None:
        """Count passes anew: gradients that are cleared before they were used go into no update."""
        if not self._is_updating:
            self._passes = 0

    def step(self, options: Mapping[str, Any]) -> StatesRecord:
        """Return the record of the update that backward made.

        A step that has fewer passes than others, as the last of an epoch may, is updated as a whole here.

        Args:
            options: Arguments of the step.

        Raises:
            SessionError: A plain step would have used something else than what backward used.
            TransferError: States cannot be read.
        """
        made, parameters = self._made, parameters_of(self.optimizer)
        if made is None and self._is_updating:
            raise SessionError(_HALFWAY)
        if made is None and any(type(local(each.grad)) is FreedGradient for each in parameters):
            raise SessionError(
                "optimizer.step() came without a backward pass since the last one. Call it once after "
                "backward(), or set states.when to step"
            )
        self._wait()
        what = None if made is None else self._what_differs(options)
        self._last = self.homes.device.event()
        if what is not None:
            raise SessionError(
                f"another {what} came after backward(), which has updated the parameters. Change it after "
                "optimizer.step(), or set states.when to step"
            )
        self._forget()
        return made or super().step(options)

    def _what_differs(self, options: Mapping[str, Any]) -> str | None:
        if any(each.grad is not self._freed.get(each) for each in parameters_of(self.optimizer)):
            return "gradient, or none,"
        if any(options.values()) or self._settings != self._settings_now():
            return "setting of the optimizer"
        if not all(map(self.entries.is_current, self.groups)):
            return "state of the optimizer"
        return None if self._values == self._values_now() else "value of a parameter"

    def _settings_now(self) -> str:
        """Return the settings of all parameter groups as text, numbers in tensors among them."""
        groups = [group.items() for group in self.optimizer.param_groups]
        settings = [(key, each) for group in groups for key, each in group if not key.startswith("param")]
        return repr([(key, each.tolist() if torch.is_tensor(each) else each) for key, each in settings])

    def _values_now(self) -> tuple[list[int], list[list[int]]]:
        """Return the versions of parameters, and in some steps digests: ``.data`` leaves versions alone."""
        closely = self._steps <= _CLOSELY or not self._steps & (self._steps - 1)
        values = (local(each.detach()) for each in (self._freed if closely else ()))
        return [each._version for each in self._freed], list(map(digest, values))


def _weakly(came: WeakMethod[Any]) -> Any:
    """Return a hook on parameters that keeps nothing alive."""

    def hook(parameter: torch.Tensor) -> None:
        if (method := came()) is not None:
            method(parameter)

    return not_traced(hook, nor_what_it_calls=True)


def _references_to(parameter: torch.Tensor) -> int:
    """Return how many tensors have the memory of a parameter."""
    return users_of(local(parameter).untyped_storage())
