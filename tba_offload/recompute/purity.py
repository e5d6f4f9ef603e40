"""Detection of side effects in the first run of a layer with each combination of training flags.

A recomputation restores random generators, the attributes that the second run sets on modules of the layer,
and small buffers that forward changes in place, such as running statistics. If the forward of a layer changes
other state, an error names the layer and the state.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
from collections.abc import Mapping
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tba_offload.errors import TbaError, UnsupportedError
from tba_offload.layers.nested import modules_in
from tba_offload.recompute.arguments import take_apart
from tba_offload.recompute.digest import digest
from tba_offload.recompute.verify import cannot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tba_offload.layers.find import State
    from tba_offload.recompute.arguments import Arguments

SMALL = 2**20
"""Maximum bytes of a small buffer. Small buffers are compared by digest, and a recomputation restores them.
Larger buffers are only compared by version."""

States = Mapping["State", Any]
"""Mapping from states to values. A state is a pair of functions: one reads the value, one sets the value."""

_OF_MODULES = frozenset((*vars(nn.Module()), "forward"))
_backends: Any = torch.backends
_cuda, _SDP = _backends.cuda, ("flash", "mem_efficient", "math", "cudnn")
_PRECISIONS = (_backends.cuda.matmul, _backends.cudnn.conv, _backends.mkldnn.matmul, _backends.mkldnn.conv)
_KERNELS: tuple[State, ...] = (
    *((getattr(_cuda, f"{kind}_sdp_enabled"), getattr(_cuda, f"enable_{kind}_sdp")) for kind in _SDP),
    *((partial(getattr, at, "fp32_precision"), partial(setattr, at, "fp32_precision")) for at in _PRECISIONS),
)
"""Settings of PyTorch that affect the choice of kernels. Some programs change these settings during forward
and restore them before backward."""


class Mode(NamedTuple):
    """The state that a recomputation must restore, for one combination of a layer's training flags.

    ``torch.utils.checkpoint`` restores PyTorch's random generators.

    Attributes:
        states: Settings that affect the choice of kernels, states of the framework, and the random generators
            of Python and NumPy if the layer uses them.
        buffers: Names of the small buffers that forward changes.
    """

    states: Sequence[State]
    buffers: Sequence[str]


def values_of(states: Iterable[State]) -> States:
    """Return the current values of states."""
    return {state: state[0]() for state in states}


@contextlib.contextmanager
def in_force(wanted: States) -> Iterator[None]:
    """Set states to the wanted values, and restore the previous values at the end of the ``with`` block."""
    present = values_of(wanted)
    _put(wanted, present)
    try:
        yield
    finally:
        _put(present, values_of(wanted))


def _put(wanted: States, present: States) -> None:
    for state, value in wanted.items():
        if not isinstance(value, bool | str) or value != present[state]:  # one setting may change another
            state[1](value)


def put_back(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Replace buffers of a module by copies of earlier values.

    Args:
        module: The module.
        values: The earlier values, by the names of the buffers.
    """
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        module.get_submodule(owner)._buffers[name] = value.clone()


class Look:
    """The state of a layer and of its arguments before the first run.

    Args:
        module: The layer.
        given: The positional and keyword arguments of the layer.
        states: States of the framework that a recomputation restores.

    Attributes:
        states: All states that a recomputation may have to restore.
        buffers: Copies of the layer's small buffers, by name.
    """

    def __init__(self, module: nn.Module, given: Arguments, states: Sequence[State]) -> None:
        self._module, self._always = module, (*_KERNELS, *states)
        numpy = sys.modules.get("numpy")
        shared = () if numpy is None else ((numpy.random.get_state, numpy.random.set_state),)
        self.states: Sequence[State] = (*self._always, (random.getstate, random.setstate), *shared)
        self._small = _small_buffers(module)
        self.buffers = {name: buffer.clone() for name, buffer in self._small.items()}
        # Values, each with the dict that holds it. An attribute that is set to another object does not count
        # as changed.
        self._values: list[tuple[str, Any, Mapping[str, Any], str]] = []
        for name, value in (*enumerate(given[0]), *given[1].items()):
            tensors: list[torch.Tensor] = []
            is_copied = take_apart(value, tensors) is not value  # changes of a copy do not count
            for each in tensors if is_copied else [value]:
                self._values.append((f"its argument {name}", each, {"": each}, ""))
        for path, inner in module.named_modules():
            attributes = {} if _is_of_torch(inner) else vars(inner)  # sharding stores its state in attributes
            self._values += [
                (".".join(filter(None, ("self", path, key))), value, owner, key)
                for owner in (inner._parameters, inner._buffers, attributes)
                for key, value in owner.items()
                if key not in _OF_MODULES and not any(value is each for each in self._small.values())
            ]
        self._before = self._prints()

    def learn(self, layer: str, found: States) -> Mode:
        """Compare the state before and after the first run, and return the state that must be restored.

        If forward assigns another object to an attribute, no error is raised, because :func:`state_kept`
        undoes this change after a second run.

        Args:
            layer: The name of the layer.
            found: The values of the states before the first run.

        Raises:
            UnsupportedError: The first run changed other state, and a second run would repeat the change.
        """
        prints = zip(self._values, self._before, self._prints(), strict=True)
        changes = [name for (name, *_), before, after in prints if after not in (before, None)]
        if changes:
            raise impure(layer, list(dict.fromkeys(changes)))
        now = {name: digest(each) for name, each in _small_buffers(self._module).items()}
        changed = [name for name, old in self.buffers.items() if now.get(name) not in (digest(old), None)]
        shared = self.states[len(self._always) :]
        drawn = [state for state in shared if pickle.dumps(state[0]()) != pickle.dumps(found[state])]
        return Mode((*self._always, *drawn), changed)

    def _prints(self) -> list[bytes | None]:
        return [_print_of(one) if owner.get(key) is one else None for _, one, owner, key in self._values]


class _Fingerprint(pickle.Pickler):
    def persistent_id(self, value: Any) -> object:
        if isinstance(value, torch.Generator):
            return digest(value.get_state())
        if isinstance(value, nn.Module):
            return [self.persistent_id(buffer) for buffer in value.buffers()]
        if isinstance(value, torch.Tensor):
            return id(value), value._version, digest(value)
        is_name = isinstance(value, type | FunctionType | ModuleType)
        return id(value) if is_name or getattr(value, "nbytes", 0) > 64 * SMALL else None


def _print_of(value: Any) -> bytes | None:
    """Return bytes that identify the contents of an object; ``None`` if the object is not checked."""
    is_read = isinstance(value, torch.Tensor | torch.Generator) or not _is_of_torch(value)
    if value is None or isinstance(value, bool | int | float | str) or not is_read:
        return None
    found = io.BytesIO()
    try:
        _Fingerprint(found).dump(value)
    except Exception:  # noqa: BLE001 - errors of the object's own code
        return None
    return found.getvalue()


def impure(layer: str, changes: Sequence[str]) -> TbaError:
    """Return the error for a layer whose forward has side effects that a second run would repeat.

    Args:
        layer: The name of the layer.
        changes: The names of the changed state.
    """
    what = ", ".join(changes[:3]) + (" and more" if len(changes) > 3 else "")
    return cannot(
        layer,
        f"the layer's forward changes {what}, and a second run would repeat the change",
        UnsupportedError,
    )


@contextlib.contextmanager
def state_kept(layer: str, module: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of a layer after its second run in the ``with`` block.

    Raises:
        UnsupportedError: The second run changed a tensor in place.
    """
    parts = modules_in(module)
    before = [(m, now, dict(now), set(m._parameters)) for m in parts for now in (vars(m), m._buffers)]
    named = ((m, k, t) for m, _, old, _ in before for k, t in old.items() if isinstance(t, torch.Tensor))
    held = [(f"{name} of {type(m).__name__}", t, t._version) for m, name, t in named]
    try:
        yield
    finally:
        for inner, now, old, parameters in before:
            if now.keys() != old.keys() or [*map(id, now.values())] != [*map(id, old.values())]:
                parameters.update(inner._parameters)  # sharding moves parameters in and out of attributes
                own = {name: value for name, value in old.items() if name not in parameters}
                shards = {name: value for name, value in now.items() if name in parameters}
                now.clear()
                now.update(own | shards)
        changed = [name for name, tensor, version in held if tensor._version != version]
        if changed:  # this error may replace the exception with which a checkpoint ends a run
            raise impure(layer, changed)


def _small_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    buffers = module.named_buffers()
    return {name: buffer for name, buffer in buffers if buffer.nbytes <= SMALL and not buffer.is_meta}


def _is_of_torch(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"
