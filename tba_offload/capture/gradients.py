"""Which gradients have come into being in a step, and how many bytes they take.

PyTorch sets gradients to None by default, so that backward allocates all of them anew. They are no
activations: they grow with the model, not with the batch, and no placement of a layer makes them fewer.
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
    """The gradients of a model, as they are put in place.

    Args:
        modules: The model or its chunks.
        device: Gradients elsewhere take no memory of it.
        about_to_count: Called with its bytes before one is counted.

    Attributes:
        live: Their bytes.
        was_dropped: Whether one of this step was freed and made again, so that what was accumulated is lost.
        watched: The parameters that are trained, or were, by id.
        born: The watched parameters that got a gradient in this step, unless a hook has taken it away.
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, about_to_count: Callable[[int], object]
    ) -> None:
        self.live = LiveBytes(device)
        self.was_dropped = False
        self._modules, self.about_to_count = modules, about_to_count
        self.watched: dict[int, Watched] = {}
        self.born: dict[int, Watched] = {}
        self.also_watch(self.parameters())  # a step may open in a transform, which has others in their place

    def begin_step(self) -> None:
        """Forget what was born; count what exists, and watch parameters that are new."""
        self.born.clear()
        self.was_dropped = False
        # ``functional_call`` gives the model other parameters in each step.
        for key in [key for key, watched in self.watched.items() if watched.parameter() is None]:
            del self.watched[key]
        parameters = list(self.parameters())  # once: a model may have thousands of modules
        self._watch(parameters)
        self._count(parameters)

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the trainable parameters of the model, each once.

        Those that were computed, as ``functional_call`` may give the model, get no gradients of their own.
        """
        return filter(_is_trained, parameters_in(self._modules))

    def also_watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the gradients of parameters of the model, or of those that train together with it."""
        self._watch(filter(_is_trained, parameters))

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.watches(parameter):
                self.watched[id(parameter)] = Watched(parameter, partial(_accumulated, weakref.ref(self)))

    def count(self) -> None:
        """Count gradients that exist and came without a word, as those of sharded parameters do."""
        told = {key for key, born in self.born.items() if born.own() is not None}
        self._count(parameter for parameter in self.parameters() if id(parameter) not in told)

    def _count(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if isinstance(gradient, torch.Tensor):
                    self.live.add(gradient)

    def alone(self) -> int | None:
        """Bytes that there are now; ``None`` where frozen weights come and go beside them."""
        gradients, frozen = self.live.parts
        return None if frozen else gradients

    @property
    def are_cleared(self) -> bool:
        """Whether all that this step has made, if any, are gone or zeros again."""
        return all(born.is_cleared() for born in self.born.values())

    @property
    def updated(self) -> bool:
        """Whether a parameter that has one was changed since."""
        return any(born.is_updated() for born in self.born.values())

    def watches(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of the model, or of those that train together with it."""
        watched = self.watched.get(id(parameter))
        return watched is not None and watched.parameter() is parameter

    def pass_ended(self) -> None:
        """Forget gradients that hooks took away within backward, and follow those that hooks replaced.

        Data parallelism does so: the program has not dropped these gradients, they are added up elsewhere, or
        lie in a bucket.
        """
        first = next(iter(self.born.values()), None)
        if first is not None and first.own() is None:  # of thousands, mostly the others as well
            self.born = {key: born for key, born in self.born.items() if born.follow()}

    def reached(self, module: nn.Module) -> bool:
        """Whether this step has made a gradient of a parameter of a module."""
        return any(id(parameter) in self.born for parameter in parameters_in((module,)))

    def close(self) -> None:
        """Take the hooks off."""
        for watched in self.watched.values():
            watched.handle.remove()
        self.watched.clear()


def _accumulated(own: weakref.ref[Gradients], parameter: torch.Tensor) -> None:
    """Record that a gradient is in its place."""
    gradients, gradient, key = own(), parameter.grad, id(parameter)
    if gradients is None or gradient is None:  # a hook before this one has taken it, as Megatron's does
        return
    watched = gradients.watched[key]
    is_again = gradients.born.get(key) is watched
    if is_again and watched.gradient() is not gradient and not gradient.requires_grad:
        gradients.was_dropped = True  # with a graph of its own it would have been replaced by the sum
    gradients.born[key] = watched
    gradients.about_to_count(gradient.nbytes if gradient.layout is torch.strided else 0)
    gradients.live.add(gradient)
    watched.parameter_version = parameter._version
    watched.follow()


def _is_trained(parameter: torch.Tensor) -> bool:
    is_lazy = issubclass(type(parameter), UninitializedParameter)  # isinstance() would be a call in Python
    return parameter.requires_grad and parameter.is_leaf and not is_lazy


class Watched:
    """A parameter whose gradients are watched: the hook on it, and the gradient that it got last.

    It refers weakly to both, and its hook to what watches: PyTorch holds that where the cyclic collector does
    not look.
    """

    __slots__ = "gradient", "gradient_version", "handle", "parameter", "parameter_version"

    def __init__(self, parameter: torch.Tensor, told: Callable[[torch.Tensor], None]) -> None:
        self.parameter = weakref.ref(parameter)
        self.parameter_version = parameter._version
        self.gradient: Callable[[], torch.Tensor | None] = lambda: None
        self.gradient_version = 0
        register: Any = parameter.register_post_accumulate_grad_hook
        self.handle: RemovableHandle = register(told)

    def own(self) -> torch.Tensor | None:
        """Return the gradient that was made, unless it has been taken away or replaced."""
        parameter, gradient = self.parameter(), self.gradient()
        return gradient if parameter is not None and parameter.grad is gradient else None

    def follow(self) -> bool:
        """Take the present gradient for the one that was made; return whether there is one."""
        parameter = self.parameter()
        present = None if parameter is None else parameter.grad
        if present is not None:
            self.gradient, self.gradient_version = weakref.ref(present), present._version
        return present is not None

    def is_cleared(self) -> bool:
        """Return True if the gradient is gone, or zeros."""
        gradient = self.own()
        if gradient is None:
            return True
        # A device is asked only where something has written the gradient, as scaling and clipping do too.
        was_written = gradient._version != self.gradient_version
        return was_written and gradient.layout is torch.strided and not bool(gradient.any())

    def is_updated(self) -> bool:
        """Return True if the parameter was changed since."""
        parameter = self.parameter()
        return parameter is not None and parameter._version != self.parameter_version
