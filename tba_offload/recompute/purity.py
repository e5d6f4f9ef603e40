"""Purity: what the first run of a layer changes, looked for once in each mode of the layer.

State of the program is not put back, with few exceptions: small buffers that forward changes in place
(running statistics), generators, and attributes that the second run itself sets. A layer that changes
anything else is refused by name.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import random
import sys
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tba_offload.errors import TbaError, UnsupportedError
from tba_offload.layers.nested import modules_in
from tba_offload.recompute.arguments import take_apart
from tba_offload.recompute.digest import digest
from tba_offload.recompute.verify import address_of, cannot

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from tba_offload.layers.find import State

SMALL = 2**20
"""Bytes of buffers that are put back by value and compared by digests; larger ones by version."""

_OF_MODULES = frozenset((*vars(nn.Module()), "forward"))
_C: Any = torch._C
_cuda: Any = torch.backends.cuda
_KERNELS: tuple[State, ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    *(
        (partial(_C._get_fp32_precision_getter, *kind), partial(_C._set_fp32_precision_setter, *kind))
        for kind in itertools.product(("cuda", "mkldnn"), ("matmul", "conv"))
    ),
)
"""Settings that choose kernels: a program may set them around forward only."""


class Mode:
    """What is known of a layer while certain modules of it train.

    Attributes:
        states: What second runs put back, beside PyTorch's generators: settings that choose kernels, what a
            framework names, and generators that the layer was seen to draw from (Python's, NumPy's, its own).
        buffers: Names of small buffers that forward changes.
    """

    def __init__(self, module: nn.Module, states: Sequence[State]) -> None:
        own = (value for inner in module.modules() for value in vars(inner).values())
        generators = [(each.get_state, each.set_state) for each in own if isinstance(each, torch.Generator)]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generators.append((numpy.random.get_state, numpy.random.set_state))
        always = (*_KERNELS, *states)
        self.states: tuple[State, ...] = (*always, (random.getstate, random.setstate), *generators)
        self._always = len(always)
        self.buffers: tuple[str, ...] = ()
        self._module = module

    def read(self) -> list[Any]:
        """Return the states as they are now."""
        return [read() for read, _ in self.states]

    def learn(self, buffers: Sequence[str], values: Mapping[str, Any], found: list[Any]) -> None:
        """Note what the first run has changed, and leave states out of ``found`` that it has not."""
        always, now = self._always, self.read()
        drawn = [pickle.dumps(one) != pickle.dumps(other) for one, other in zip(now, found, strict=True)]
        kept = [True] * always + drawn[always:]
        self.buffers = tuple(buffers)
        buffer_states = ((partial(self._read, name), partial(self._write, name)) for name in buffers)
        self.states = (*itertools.compress(self.states, kept), *buffer_states)
        found[:] = [*itertools.compress(found, kept), *(values[name] for name in buffers)]

    def addresses(self) -> set[int | None]:
        """Return the addresses of the storages of buffers that are put back."""
        return {address_of(self._module.get_buffer(name)) for name in self.buffers}

    def _read(self, name: str) -> torch.Tensor:
        return self._module.get_buffer(name).clone()

    def _write(self, name: str, value: torch.Tensor) -> None:
        # ``.data`` raises no version: other graphs may have saved the buffer.
        self._module.get_buffer(name).data.copy_(value)


@contextlib.contextmanager
def in_force(states: Sequence[State], wanted: Sequence[Any]) -> Iterator[None]:
    """Put states in force, and the present ones back at the end."""
    present = [read() for read, _ in states]
    _put(states, wanted, present)
    try:
        yield
    finally:
        _put(states, present, [read() for read, _ in states])


def _put(states: Sequence[State], wanted: Sequence[Any], present: Sequence[Any]) -> None:
    for (_, put), value, now in zip(states, wanted, present, strict=True):
        if not isinstance(value, bool | str) or value != now:
            put(value)


class Look:
    """A layer and its arguments before the first run."""

    def __init__(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        self._module = module
        self._small = small = _small_buffers(module)
        self.values = {name: buffer.clone() for name, buffer in small.items()}
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._tensors += [(f"the parameter {name}", each) for name, each in module.named_parameters()]
        large = ((name, each) for name, each in module.named_buffers() if name not in small)
        self._tensors += [(f"the buffer {name}", each) for name, each in large]
        self._objects: list[tuple[str, Any, Mapping[str, Any], str]] = []
        for name, value in arguments.items():
            tensors: list[torch.Tensor] = []
            if take_apart(value, tensors) is value:  # others are copied: what forward puts there is no change
                self._objects.append((f"its argument {name}", value, arguments, name))
            self._tensors += [(f"its argument {name}", each) for each in tensors]
        for prefix, inner in module.named_modules():
            if _is_of_torch(inner):  # sharding keeps books there
                continue
            self._objects += [
                (".".join(filter(None, ("self", prefix, key))), value, vars(inner), key)
                for key, value in vars(inner).items()
                if key not in _OF_MODULES and not isinstance(value, torch.Generator)
            ]
        self._before = self._facts()

    def changes(self) -> tuple[list[str], list[str]]:
        """Return names of what a second run would change again, and of buffers that can be put back.

        Attributes that forward sets to another object are no changes: see :func:`attributes_kept`.
        """
        names = [*(name for name, _ in self._tensors), *(name for name, *_ in self._objects)]
        facts = zip(names, self._before, self._facts(), strict=True)
        named = [name for name, before, now in facts if now not in (before, None)]
        small = {name: each for name, each in _small_buffers(self._module).items() if name in self._small}
        named += [f"the buffer {name}" for name, each in small.items() if each is not self._small[name]]
        changed = [name for name, each in small.items() if digest([each]) != digest([self.values[name]])]
        return list(dict.fromkeys(named)), changed

    def _facts(self) -> list[object]:
        tensors = [_fact(each) for _, each in self._tensors]
        objects = (value if owner.get(key) is value else None for _, value, owner, key in self._objects)
        return [*tensors, *map(_print_of, objects)]


class _Fingerprint(pickle.Pickler):
    """Pickles an object, with digests and versions in the place of its tensors."""

    def persistent_id(self, value: Any) -> object:
        """Return what stands for a value that is not pickled."""
        if isinstance(value, torch.Generator):
            return digest([value.get_state()])
        if isinstance(value, nn.Module):
            return [_fact(each) for each in value.buffers()]
        if isinstance(value, torch.Tensor):
            return _fact(value)
        is_name = isinstance(value, type | FunctionType | ModuleType)
        return id(value) if is_name or getattr(value, "nbytes", 0) > 64 * SMALL else None


def _print_of(value: Any) -> bytes | None:
    """Return bytes that change with what an object holds; ``None`` if that cannot be seen."""
    is_tensor = isinstance(value, torch.Tensor)
    if (
        value is None
        or isinstance(value, bool | int | float | str)
        or (_is_of_torch(value) and not is_tensor)
    ):
        return None
    found = io.BytesIO()
    try:
        _Fingerprint(found).dump(value)
    except Exception:  # noqa: BLE001 - of the object's own code
        return None
    return found.getvalue()


def impure(layer: str, changes: Sequence[str]) -> TbaError:
    """Return the error of a layer whose forward changes what a second run would change again."""
    what = ", ".join(changes[:3]) + (" and more" if len(changes) > 3 else "")
    cause = f"its forward changes {what}, and a second run would change that again"
    return cannot(layer, cause, UnsupportedError)


@contextlib.contextmanager
def attributes_kept(layer: str, module: nn.Module, restored: Container[int | None]) -> Iterator[None]:
    """Undo what a second run sets of the attributes of a layer: auxiliary losses, counters, probes.

    Raises:
        UnsupportedError: A tensor was changed in place. :class:`Look` cannot tell where the very first run
            did not, as with a sum that begins as ``None``.
    """
    inside = modules_in(module)
    before = [(vars(inner), dict(vars(inner)), set(inner._parameters)) for inner in inside]
    held = [
        (inner, name, value, value._version)
        for inner, (_, old, _) in zip(inside, before, strict=True)
        for name, value in (*old.items(), *inner._buffers.items())
        if isinstance(value, torch.Tensor) and address_of(value) not in restored
    ]
    try:
        yield
    finally:
        for now, old, parameters in before:
            if now.keys() != old.keys() or [*map(id, now.values())] != [*map(id, old.values())]:
                parameters.update(now["_parameters"])  # sharding moves these in and out of attributes
                own = {name: value for name, value in old.items() if name not in parameters}
                shards = {name: value for name, value in now.items() if name in parameters}
                now.clear()
                now.update(own | shards)
        if changed := [(inner, name) for inner, name, tensor, version in held if tensor._version != version]:
            paths = {inner: path for path, inner in module.named_modules()}
            names = [".".join(filter(None, ("self", paths[inner], name))) for inner, name in changed]
            raise impure(layer, names)  # also in the place of the error by which checkpoints end a run


def _small_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    buffers = module.named_buffers()
    return {name: buffer for name, buffer in buffers if buffer.nbytes <= SMALL and not buffer.is_meta}


def _is_of_torch(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _fact(tensor: torch.Tensor) -> object:
    try:
        return id(tensor), tensor._version, digest([tensor])
    except (TypeError, RuntimeError):
        return id(tensor)  # of a kind whose bytes cannot be read
