"""What a layer's forward finds beside its tensors: parameters, buffers, attributes, objects it is given.

A second forward gives the same numbers only if it finds all of that as the first one did. What has been
replaced meanwhile is put back for as long as the second run lasts: other adapters, another scale, a counter,
the parameters of ``torch.func.functional_call``, parametrized weights that were cached. What was changed in
place is gone, and is told.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tba_offload.errors import SavedTensorModifiedError
from tba_offload.layers.nested import tensors_in
from tba_offload.recompute.code import PLAIN
from tba_offload.recompute.contents import Contents, Held, address_of, copy_of, version_of
from tba_offload.recompute.digests import digests
from tba_offload.recompute.modules import Modules
from tba_offload.recompute.parametrized import CachedWeights
from tba_offload.recompute.tallies import Tallies, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tba_offload.device.digest import Digest
    from tba_offload.layers.randomness import Generator
    from tba_offload.recompute.tallies import Place

_GRADIENTS = ("grad", "main_grad")
"""Attributes of a parameter with its gradient; the second one is Megatron-LM's."""


class _Slot(NamedTuple):
    """A place where a module has a parameter or a buffer, and what was found in it.

    Attributes:
        copy: Of a small buffer, which the layer may change.
    """

    owner: Any
    name: str
    tensor: torch.Tensor
    version: int
    is_parameter: bool
    trains: bool
    copy: torch.Tensor | None = None

    @property
    def place(self) -> Place:
        """Where it is."""
        return place_of(self.owner, self.name)


class _Seen(NamedTuple):
    """A tensor that was found in an argument."""

    storage: int
    version: int
    shape: tuple[int, ...]


class Surroundings:
    """What one call of a layer finds.

    Args:
        layer: The layer.
        arguments: What its forward is given, by position or name.
        tallies: Its buffers that only runs with gradients write to, as far as they are known.
        known: Its modules as an earlier run found them.

    Attributes:
        modules: Its modules, and what they hold.
        unknown: What the layer reaches whose state cannot be put back; ``None`` if there is no such thing.

    Raises:
        TooManyError: The arguments hold more objects than can be looked through.
    """

    __slots__ = (
        *("_arguments", "_cached", "_given", "_layer", "_left_alone", "_own", "_slots", "_tallies"),
        *("modules", "unknown"),
    )

    def __init__(
        self,
        layer: nn.Module,
        arguments: Mapping[int | str, object],
        tallies: Tallies,
        known: Modules | None = None,
    ) -> None:
        self._layer = layer
        self._tallies = tallies
        self._left_alone: frozenset[Place] = (
            frozenset()
        )  # what a first run without gradients does not write to
        self._given = Contents(copies=False)  # of its arguments
        for key, value in arguments.items():
            self._given.add(f"a tensor in the argument {argument_name(key)}", value, saves_tuples=True)
        self._given.end()
        given = self._given.modules
        is_known = not given and known is not None and known.are_as_found()
        self.modules: Modules = known if is_known else Modules(layer, given)  # type: ignore[assignment]
        self.unknown = self.modules.unknown or self._given.unknown
        self._slots = [*_slots_of(self.modules)]
        self._own = self.modules.contents
        if self._own.tensors:
            self._own.leave_out(self._parameter_addresses())
        self._cached = CachedWeights(module for module, _ in self.modules)
        self._arguments = {key: _seen_in(value) for key, value in arguments.items()}

    @property
    def generators(self) -> list[Generator]:
        """Generators of random numbers among the layer's attributes and its arguments."""
        return self._own.generators + self._given.generators

    def _parameter_addresses(self) -> set[int]:
        """Of the memory of parameters and their gradients, which the layer may reach as a buffer of many."""
        parameters = [slot.tensor for slot in self._slots if slot.is_parameter]
        leaves = [each for each in parameters if each.is_leaf]  # others warn when they are asked
        gradients = (getattr(each, name, None) for each in leaves for name in _GRADIENTS)
        held = (each for each in gradients if isinstance(each, torch.Tensor))
        return {address_of(each) for each in (*parameters, *held)}

    def end_first_run(self) -> None:
        """Note which small buffers a first run without gradients has left alone: one with them may not."""
        if not torch.is_grad_enabled():
            copied = (slot for slot in self._slots if slot.copy is not None)
            self._left_alone = frozenset(slot.place for slot in copied if not _is_written(slot))

    def changed_argument(self, arguments: Mapping[int | str, object]) -> str | None:
        """Which of the same arguments holds other tensors now, or changed ones; ``None`` for none of them."""
        changed = (key for key, value in arguments.items() if _seen_in(value) != self._arguments.get(key))
        return next((argument_name(key) for key in changed), None)

    def large(self) -> dict[str, list[Digest]]:
        """Digests by name of what is too large to be copied, and may be changed past any version."""
        buffers = (slot for slot in self._slots if slot.copy is None and not slot.is_parameter)
        found = {self._full_name(slot): slot.tensor for slot in buffers}
        found.update(self._own.large())
        return {name: digests(tensor) for name, tensor in found.items() if _is_dense(tensor)}

    def restorable(self) -> set[int]:
        """Addresses of the tensors that :meth:`restored` may overwrite."""
        found: Iterable[_Slot | Held] = (*self._slots, *self._own.tensors)
        return {address_of(each.tensor) for each in found if each.copy is not None}

    def changed_in_place(self) -> str | None:
        """Which tensor that the layer found has changed in place since; ``None`` for none of them."""
        for slot in self._slots:
            if slot.copy is None and version_of(slot.tensor) != slot.version:
                return self._full_name(slot)
        contents = self._own.changed_in_place() or self._given.changed_in_place()
        return contents or self._cached.changed_in_place()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Have the layer find the same inside the block; after it all is as it was before the block.

        Raises:
            SavedTensorModifiedError: A tensor was changed in place meanwhile.
        """
        changed = self.changed_in_place()
        if changed is not None:
            raise SavedTensorModifiedError(too_late(changed))
        with contextlib.ExitStack() as undo:
            self.modules.put_back(undo.callback)
            self._cached.put_back(undo.callback)
            self._given.holders.put_back(undo.callback)
            self._restore_slots(undo.callback)
            self._restore_values(undo)
            yield

    def _restore_slots(self, undo: Callable[..., object]) -> None:
        for slot in self._slots:
            if slot.is_parameter and _is_other(found := slot.owner.get(slot.name), slot.tensor):
                undo(slot.owner.__setitem__, slot.name, found)
                slot.owner[slot.name] = slot.tensor
            if slot.tensor.requires_grad != slot.trains and slot.tensor.is_leaf:
                undo(slot.tensor.requires_grad_, slot.tensor.requires_grad)
                slot.tensor.requires_grad_(slot.trains)

    def _restore_values(self, undo: contextlib.ExitStack) -> None:
        """Give small buffers that were changed in place their values back; nothing else notices."""
        slots = (slot for slot in self._slots if slot.copy is not None and slot.place not in self._tallies)
        found: list[_Slot | Held] = [*slots, *(held for held in self._own.tensors if held.copy is not None)]
        if not found:
            return
        versions = tuple(each.tensor for each in found)
        undo.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(versions))
        for each in found:
            before, is_late = each.tensor.detach().clone(), _is_written(each)
            _overwrite(each.tensor, each.copy)
            undo.callback(self._take_back, each, before, version_of(each.tensor), is_late=is_late)

    def _take_back(self, found: _Slot | Held, before: torch.Tensor, version: int, *, is_late: bool) -> None:
        """Undo what a second run did to a small tensor, unless it is what only runs with gradients do.

        Args:
            found: The tensor.
            before: Its values before the second run.
            version: What it had when the second run began.
            is_late: Whether something else has written to it since the first run.
        """
        is_written = version_of(found.tensor) != version
        if isinstance(found, _Slot) and is_written and found.place in self._left_alone:
            if not is_late:
                self._tallies.add(found.place)
                return
            _overwrite(found.tensor, before)
            raise SavedTensorModifiedError(too_late(self._full_name(found)))
        _overwrite(found.tensor, before)

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """Undo what the block writes into buffers and other tensors of the layer, versions and all."""
        buffers = [slot.tensor for slot in self._slots if not slot.is_parameter]
        tensors = [*buffers, *(held.tensor for held in self._own.tensors)]
        # A view of a gathered parameter may not even be asked for its graph.
        plain = [each for each in tensors if _is_dense(each) and each.is_leaf and not each.is_inference()]
        copies = [tensor.detach().clone() for tensor in plain]
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(plain)):
            try:
                yield
            finally:
                for tensor, copy in zip(plain, copies, strict=True):
                    _overwrite(tensor, copy)

    def _full_name(self, slot: _Slot) -> str:
        for prefix, module in self._layer.named_modules():
            if slot.owner is module._parameters or slot.owner is module._buffers:
                return f"{prefix}.{slot.name}" if prefix else slot.name
        return slot.name


def _slots_of(modules: Modules) -> Iterator[_Slot]:
    """Yield the parameters and buffers of modules."""
    for module, buffers in modules:
        owner: Any = module._parameters
        for name, tensor in owner.items():
            if tensor is not None:
                yield _Slot(owner, name, tensor, version_of(tensor), True, tensor.requires_grad)  # noqa: FBT003
        owner = module._buffers
        for name, tensor in buffers.items():
            if tensor is not None:
                trains, copy = tensor.requires_grad, copy_of(tensor)
                yield _Slot(owner, name, tensor, version_of(tensor), False, trains, copy)  # noqa: FBT003


def _is_written(found: _Slot | Held) -> bool:
    """Whether a tensor was changed in place since it was found, as far as that is counted."""
    return version_of(found.tensor) != found.version


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that can be written as a whole."""
    return not tensor._is_view() and tensor.layout is torch.strided and not tensor.is_quantized


def _overwrite(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    # By value, because batch norm does not count what it does to its running statistics; and memory that was
    # not changed may not even be writable.
    if values is not None and not _are_equal(tensor, values):
        with torch.no_grad():
            tensor.resize_(values.shape).copy_(values)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def too_late(what: str) -> str:
    """Return the message of an error about what a second run would not find as the first one did."""
    return (
        f"{what} was changed in place between the forward of the layer and its backward, which computes the "
        "layer anew: change it after backward, or place the layer keep or offload"
    )


def argument_name(key: int | str) -> str:
    """Return what messages call an argument that is given by position or name."""
    return key if isinstance(key, str) else f"number {key}"


def _is_other(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    """Whether a slot holds another tensor than it did, and not only another view of the same memory.

    Sharded data parallelism makes new views of gathered parameters, and puts a ``DTensor`` in the slot of
    what it does not hold at the moment.
    """
    if found is wanted:
        return False
    if found is None:
        return True
    kinds = (torch.Tensor, nn.Parameter)
    if type(found) not in kinds or type(wanted) not in kinds:
        return False
    return _place_of(found) != _place_of(wanted)


def _place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        *(address_of(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()),
        *(tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad),
    )


def _seen_in(argument: object) -> list[_Seen]:
    """Return the tensors in an argument, as far as it can be looked into."""
    if type(argument) in PLAIN:
        return []
    found: Iterable[Any] = (argument,) if type(argument) is torch.Tensor else tensors_in(argument)
    return [_Seen(address_of(tensor), version_of(tensor), _shape_of(tensor)) for tensor in found]


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's dimensions; of a strided nested tensor, which has none to ask for, its elements."""
    has_none = tensor.is_nested and tensor.layout is torch.strided
    return (tensor.numel(),) if has_none else tuple(tensor.shape)
