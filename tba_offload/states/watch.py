"""Hooks that tell when gradients come, and when something comes instead of the optimizer's step."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tba_offload.layers.hooks import HookFreeCopies, InstalledHook
from tba_offload.layers.untraced import not_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Watch:
    """Hooks on parameters and modules.

    Args:
        modules: The model or its chunks.
        came: Called in backward with a parameter whose gradient is there.
        forward: Called before a forward of any part of the model, between :meth:`forwards` and
            :meth:`no_forwards`.
        saved: Called before a checkpoint of any part of the model is made.
        loaded: Called before one is loaded, into the model or into the optimizer.
        optimizer: The optimizer.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        came: Callable[[torch.Tensor], None],
        forward: Callable[[], None],
        saved: Callable[[], None],
        loaded: Callable[[], None],
    ) -> None:
        self._modules = tuple(modules)
        self._came = _Hook(came, takes=1)
        self._forward = _Hook(forward)
        self._on_forwards: RemovableHandle | None = None
        self._on_parameters: dict[torch.Tensor, RemovableHandle] = {}
        self._handles: list[RemovableHandle | HookFreeCopies] = [
            optimizer.register_load_state_dict_pre_hook(_Hook(loaded)),
            HookFreeCopies(self._all_modules()),
        ]
        module: Any  # whose methods for hooks on checkpoints have no types
        for module in self._all_modules():
            self._handles += [
                module.register_state_dict_pre_hook(_Hook(saved)),
                module.register_load_state_dict_pre_hook(_Hook(loaded)),
            ]

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters from now on, as far as they are trained."""
        wanted = {each for each in parameters if each.is_leaf and each.requires_grad}
        for parameter in self._on_parameters.keys() - wanted:
            self._on_parameters.pop(parameter).remove()
        for parameter in wanted - self._on_parameters.keys():
            register: Any = parameter.register_post_accumulate_grad_hook
            self._on_parameters[parameter] = register(self._came)

    def forwards(self) -> None:
        """Watch all forwards from now on: a hook on the model alone would not see those of its parts."""
        if self._on_forwards is None:
            self._on_forwards = register_module_forward_pre_hook(_Hook(self._forward_begins, takes=1))

    def __del__(self) -> None:
        """Record that the hook on all forwards goes too."""
        self.no_forwards()

    def no_forwards(self) -> None:
        """Watch them no more."""
        if self._on_forwards is not None:
            self._on_forwards.remove()
            self._on_forwards = None

    def _forward_begins(self, module: nn.Module) -> None:
        is_in_backward = torch._C._current_graph_task_id() != -1  # which may run part of the model again
        if not is_in_backward and any(module is each for each in self._all_modules()):
            self._forward()

    def _all_modules(self) -> dict[nn.Module, None]:
        return dict.fromkeys(each for module in self._modules for each in module.modules())

    def close(self) -> None:
        """Take all hooks off."""
        self.no_forwards()
        for handle in (*self._handles, *self._on_parameters.values()):
            handle.remove()
        self._handles.clear()
        self._on_parameters.clear()


class _Hook(InstalledHook):
    """A hook that keeps nothing alive.

    Args:
        method: The bound method to call.
        takes: How many of the hook's arguments it gets.
    """

    def __init__(self, method: Callable[..., None], *, takes: int = 0) -> None:
        self._method = weakref.WeakMethod(method)
        self._takes = takes

    @partial(not_traced, nor_what_it_calls=True)
    def __call__(self, *arguments: object) -> None:
        method = self._method()
        if method is not None:
            method(*arguments[: self._takes])
