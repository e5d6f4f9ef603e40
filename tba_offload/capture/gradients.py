"""The gradients that a step creates, and their size in bytes.

By default, ``zero_grad()`` sets gradients to ``None``, so each backward pass allocates all gradients again.
The size of gradients depends on the model, and not on the batch or on placements.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedParameter

from tba_offload.device.meters import LiveBytes
from tba_offload.layers.nested import parameters_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle


class Gradients:
    """Counter of a model's gradients. Each gradient is counted when backward creates the gradient.

    Args:
        modules: The model or its chunks.
        device: The device on which gradients are counted. Gradients on other devices are ignored.
        about_to_count: Function that is called with the bytes of each gradient before the gradient is
            counted.

    Attributes:
        live: Counter of the bytes of existing gradients.
        was_dropped: Whether the program dropped a gradient between two backward passes of this step, so that
            accumulated values are lost.
        watched: The hook of each parameter, by the ``id()`` of the parameter.
        born: The entries of ``watched`` whose parameter has got a gradient in this step.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, about_to_count: Callable[[int], object]
    ) -> None:
        self.live = LiveBytes(device)
        self.was_dropped = False
        self._modules, self.about_to_count = modules, about_to_count
        self.watched: dict[int, Watched] = {}
        self.born: dict[int, Watched] = {}
        self.also_watch(self.parameters())  # a step may begin in a transform, which replaces parameters

    def begin_step(self) -> None:
        """Clear the records, count the gradients that exist, and add hooks to new parameters."""
        self.born.clear()
        self.was_dropped = False
        # ``functional_call`` gives the model new parameters in each step.
        for key in [key for key, watched in self.watched.items() if watched.parameter() is None]:
            del self.watched[key]
        parameters = list(self.parameters())  # only once, because a model may have thousands of modules
        self._watch(parameters)
        self._count(parameters)

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the trainable leaf parameters of the model, without duplicates."""
        return filter(_is_trained, parameters_in(self._modules))

    def also_watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the gradients of more parameters, for example of another model in the same step."""
        self._watch(filter(_is_trained, parameters))

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.watches(parameter):
                self.watched[id(parameter)] = Watched(parameter, partial(_accumulated, weakref.ref(self)))

    def count(self) -> None:
        """Count existing gradients for which no hook was called, such as gradients of sharded parameters."""
        counted = {key for key, born in self.born.items() if born.own() is not None}
        self._count(parameter for parameter in self.parameters() if id(parameter) not in counted)

    def _count(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if isinstance(gradient, torch.Tensor):
                    self.live.add(gradient)

    def alone(self) -> int | None:
        """Return the bytes of existing gradients; ``None`` if the counter includes frozen weights."""
        gradients, frozen = self.live.parts
        return None if frozen else gradients

    @property
    def are_cleared(self) -> bool:
        """Whether every gradient of this step was freed or set to zero."""
        return all(born.is_cleared() for born in self.born.values())

    @property
    def updated(self) -> bool:
        """Whether a parameter was changed after backward stored its gradient."""
        return any(born.is_updated() for born in self.born.values())

    def watches(self, parameter: torch.Tensor) -> bool:
        """Return True if the gradients of this parameter are counted."""
        watched = self.watched.get(id(parameter))
        return watched is not None and watched.parameter() is parameter

    def pass_ended(self) -> None:
        """Update the list of this step's gradients at the end of a backward pass.

        Hooks of data parallelism may remove gradients in backward, or replace gradients by views of a bucket.
        """
        first = next(iter(self.born.values()), None)
        if first is not None and first.own() is None:  # if one gradient is updated, usually all others are
            self.born = {key: born for key, born in self.born.items() if born.follow()}

    def reached(self, module: nn.Module) -> bool:
        """Return True if a parameter of ``module`` has got a gradient in this step."""
        return any(id(parameter) in self.born for parameter in parameters_in((module,)))

    def close(self) -> None:
        """Remove the hooks."""
        for watched in self.watched.values():
            watched.handle.remove()
        self.watched.clear()


def _accumulated(own: weakref.ref[Gradients], parameter: torch.Tensor) -> None:
    gradients, gradient, key = own(), parameter.grad, id(parameter)
    if gradients is None or gradient is None:  # an earlier hook removed the gradient, as Megatron's does
        return
    watched = gradients.watched[key]
    is_again = gradients.born.get(key) is watched
    if is_again and watched.gradient() is not gradient and not gradient.requires_grad:
        gradients.was_dropped = True  # PyTorch accumulates in place, except if the gradient has a graph
    gradients.born[key] = watched
    gradients.about_to_count(gradient.nbytes if gradient.layout is torch.strided else 0)
    gradients.live.add(gradient)
    watched.parameter_version = parameter._version
    watched.follow()


def _is_trained(parameter: torch.Tensor) -> bool:
    is_lazy = issubclass(type(parameter), UninitializedParameter)  # isinstance() would run Python code
    return parameter.requires_grad and parameter.is_leaf and not is_lazy


class Watched:
    """The hook of one parameter, and the last gradient of the parameter.

    All references are weak. The garbage collector does not see PyTorch's reference to the hook, so a strong
    reference from the hook would keep :class:`Gradients` alive forever.
    """

    __slots__ = "gradient", "gradient_version", "handle", "parameter", "parameter_version"

    def __init__(self, parameter: torch.Tensor, accumulated: Callable[[torch.Tensor], None]) -> None:
        self.parameter = weakref.ref(parameter)
        self.parameter_version = parameter._version
        self.gradient: Callable[[], torch.Tensor | None] = lambda: None
        self.gradient_version = 0
        register: Any = parameter.register_post_accumulate_grad_hook
        self.handle: RemovableHandle = register(accumulated)

    def own(self) -> torch.Tensor | None:
        """Return the recorded gradient; ``None`` if the parameter has lost this gradient."""
        parameter, gradient = self.parameter(), self.gradient()
        return gradient if parameter is not None and parameter.grad is gradient else None

    def follow(self) -> bool:
        """Record the current gradient of the parameter; return False if the parameter has no gradient."""
        parameter = self.parameter()
        present = None if parameter is None else parameter.grad
        if present is not None:
            self.gradient, self.gradient_version = weakref.ref(present), present._version
        return present is not None

    def is_cleared(self) -> bool:
        """Return True if the gradient was freed, or contains only zeros."""
        gradient = self.own()
        if gradient is None:
            return True
        # Reading values waits for the device, so values are read only if the gradient was written. Loss
        # scaling also writes to gradients.
        was_written = gradient._version != self.gradient_version
        return was_written and gradient.layout is torch.strided and not bool(gradient.any())

    def is_updated(self) -> bool:
        """Return True if the parameter was changed after backward stored its gradient."""
        parameter = self.parameter()
        return parameter is not None and parameter._version != self.parameter_version
