"""Which gradients have come into being in a step, and how many bytes they take.

PyTorch sets gradients to None by default, so that backward allocates all of them anew. They are no
activations: they grow with the model, not with the batch, and no placement of a layer makes them fewer.
"""

from __future__ import annotations

import weakref
from itertools import filterfalse
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
    """

    def __init__(
        self, modules: Sequence[nn.Module], device: torch.device, about_to_count: Callable[[int], object]
    ) -> None:
        self.live = LiveBytes(device)
        self.was_dropped = False
        self._modules = modules
        self._about_to_count = about_to_count
        self._watched: dict[int, _Watched] = {}
        self._born: dict[int, _Watched] = {}  # those that got a gradient in this step
        weakref.finalize(self, _unwatch, self._watched)
        self.also_watch(self.parameters())  # a step may open in a transform, which has others in their place

    def begin_step(self) -> None:
        """Forget what was born; count what exists, and watch parameters that are new."""
        self._born.clear()
        self.was_dropped = False
        # ``functional_call`` gives the model other parameters in each step.
        for key in [key for key, watched in self._watched.items() if watched.parameter() is None]:
            del self._watched[key]
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
            known = self._watched.get(id(parameter))
            if known is None or known.parameter() is not parameter:
                self._watched[id(parameter)] = _Watched(parameter, weakref.ref(self))

    def count(self) -> None:
        """Count gradients that exist and came without a word, as those of sharded parameters do."""
        self._count(filterfalse(self._told_of, self.parameters()))

    def _told_of(self, parameter: torch.Tensor) -> bool:
        """Whether its gradient, if it has one, came with a word. One that is given other bytes still has."""
        watched = self._watched.get(id(parameter))  # as in watches(): models have thousands of parameters
        if watched is None or watched.parameter() is not parameter or hasattr(parameter, "main_grad"):
            return False
        return parameter.grad is watched.gradient()

    def _count(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                if isinstance(gradient, torch.Tensor):
                    self.live.add(gradient)

    @property
    def trained(self) -> int:
        """How many parameters are trained, or were: where more are, gradients come elsewhere too."""
        return len(self._watched)

    def alone(self) -> int | None:
        """Bytes that there are now; ``None`` where frozen weights come and go beside them."""
        gradients, frozen = self.live.parts
        return None if frozen else gradients

    @property
    def are_there(self) -> bool:
        """Whether this step has made gradients and no hook has taken them away within backward."""
        return bool(self._born)

    @property
    def are_cleared(self) -> bool:
        """Whether all that this step has made are gone, or zeros again."""
        return bool(self._born) and all(born.is_cleared for born in self._born.values())

    @property
    def updated(self) -> bool:
        """Whether a parameter that has one was changed since."""
        return any(born.is_updated for born in self._born.values())

    def born_within(self, parameters: frozenset[int]) -> bool:
        """Whether all that this step has made belong to parameters of these ids."""
        return self._born.keys() <= parameters

    def watches(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of the model, or of those that train together with it."""
        watched = self._watched.get(id(parameter))
        return watched is not None and watched.parameter() is parameter

    def pass_ended(self) -> None:
        """Forget gradients that hooks took away within backward, and follow those that hooks replaced.

        Data parallelism does so: the program has not dropped these gradients, they are added up elsewhere, or
        lie in a bucket.
        """
        first = next(iter(self._born.values()), None)
        if first is None or not first.is_gone:  # of thousands, mostly
            return
        self._born = {key: born for key, born in self._born.items() if born.follow()}

    def reached(self, module: nn.Module) -> bool:
        """Whether this step has made a gradient of a parameter of a module."""
        return any(id(parameter) in self._born for parameter in parameters_in((module,)))

    def close(self) -> None:
        """Take the hooks off."""
        _unwatch(self._watched)

    def accumulated(self, watched: _Watched, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record that a gradient is in its place."""
        is_again = self._born.get(id(parameter)) is watched
        if is_again and watched.gradient() is not gradient and not gradient.requires_grad:
            self.was_dropped = True  # with a graph of its own it would have been replaced by the sum
        self._born[id(parameter)] = watched
        self._about_to_count(gradient.nbytes if gradient.layout is torch.strided else 0)
        self.live.add(gradient)


def _is_trained(parameter: torch.Tensor) -> bool:
    is_lazy = issubclass(type(parameter), UninitializedParameter)  # isinstance() would be a call in Python
    return parameter.requires_grad and parameter.is_leaf and not is_lazy


def _unwatch(all_watched: dict[int, _Watched]) -> None:
    for watched in all_watched.values():
        watched.handle.remove()
    all_watched.clear()


class _Watched:
    """A parameter whose gradients are watched: the hook on it, and the gradient that it got last.

    It refers weakly to both and to what watches: PyTorch holds it where the cyclic collector does not look.
    """

    __slots__ = "_gradients", "gradient", "gradient_version", "handle", "parameter", "parameter_version"

    def __init__(self, parameter: torch.Tensor, gradients: weakref.ref[Gradients]) -> None:
        self._gradients = gradients
        self.parameter = weakref.ref(parameter)
        self.parameter_version = parameter._version
        self.gradient: Callable[[], torch.Tensor | None] = lambda: None
        self.gradient_version = 0
        register: Any = parameter.register_post_accumulate_grad_hook
        self.handle: RemovableHandle = register(self)

    def __call__(self, parameter: torch.Tensor) -> None:
        gradients, gradient = self._gradients(), parameter.grad
        if gradients is None or gradient is None:  # a hook before this one has taken it, as Megatron's does
            return
        gradients.accumulated(self, parameter, gradient)
        self.parameter_version = parameter._version
        self.follow()

    def present(self) -> torch.Tensor | None:
        """Return the gradient that the parameter has now."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    @property
    def is_gone(self) -> bool:
        """Whether the gradient that was made has been taken away or replaced."""
        present = self.present()
        return present is None or present is not self.gradient()

    def follow(self) -> bool:
        """Take the present gradient for the one that was made; return whether there is one."""
        present = self.present()
        if present is not None:
            self.gradient, self.gradient_version = weakref.ref(present), present._version
        return present is not None

    @property
    def is_cleared(self) -> bool:
        gradient = self.present()
        if gradient is None or gradient is not self.gradient():
            return True
        # A device is asked only where something has written the gradient, as scaling and clipping do too.
        was_written = gradient._version != self.gradient_version
        return was_written and gradient.layout is torch.strided and not bool(gradient.any())

    @property
    def is_updated(self) -> bool:
        parameter = self.parameter()
        return parameter is not None and parameter._version != self.parameter_version
