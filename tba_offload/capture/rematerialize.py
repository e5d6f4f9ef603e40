"""The hooks for placement ``offload-remat``: backward computes the outputs of cheap functions again.

While a layer runs, a ``TorchFunctionMode`` records each call of a cheap PyTorch function. If autograd saves
the output of this call, the hooks save the arguments of the call instead. Backward calls the function again
with the saved arguments. The digests of the first and the second output are compared before the optimizer's
step.

A ``TorchFunctionMode`` does not see calls of a ``torch.autograd.Function``. The functions in :data:`_CLASSES`
are therefore wrapped.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function

from tba_offload.capture.hooks import LayerHooks, Packed
from tba_offload.capture.trace import ActivationKey, ActivationTrace, Treatment
from tba_offload.capture.views import View, restore, version_probe, view_of, viewed
from tba_offload.layers.graph import check_version
from tba_offload.recompute.digest import fold, mix
from tba_offload.torch_private import untraced

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.capture.hooks import Capture
    from tba_offload.capture.trace import ScopeKey
    from tba_offload.recompute.verify import Verifier

_NAMES = (
    "__pow__ __rdiv__ __rpow__ __rsub__ abs add addcmul bfloat16 clamp cos div elu erf exp float gelu glu "
    "half hardswish layer_norm leaky_relu logsigmoid mean mish mul neg pow reciprocal relu relu6 rms_norm "
    "rsqrt selu sigmoid silu sin softplus sqrt square sub tanh to type_as where"
)

CHEAP = {getattr(room, x, None) for x in _NAMES.split() for room in (torch, Tensor, nn.functional)}
"""Functions whose speed is limited by memory bandwidth, and that draw no random numbers."""

DEEPEST = 12
"""Maximum number of calls that rebuild one saved tensor, each from the output of the previous call."""

_CLASSES = (
    ("megatron.core.fusions.fused_bias_gelu", "GeLUFunction"),
    ("megatron.core.fusions.fused_bias_geglu", "GeGLUFunction BiasGeGLUFunction"),
    ("megatron.core.fusions.fused_bias_geglu", "WeightedQuickGeGLUFunction WeightedBiasQuickGeGLUFunction"),
    ("megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction BiasSwiGLUFunction WeightedSwiGLUFunction"),
    ("megatron.core.fusions.fused_weighted_squared_relu", "WeightedSquaredReLUFunction"),
)
"""Names of Python modules, each with the names of its cheap ``torch.autograd.Function`` classes."""

_wrapped: dict[Any, Any] = {}
"""For each wrapped class, the function that replaces its method ``apply``."""


class RematerializingHooks(LayerHooks, TorchFunctionMode):
    """The hooks of one run of a layer placed ``offload-remat``.

    Args:
        capture: The session's capture.
        key: The run of the layer.
        verifier: The comparisons of the first and the second output of each call.
        when_slow: Whether activations may stay in memory when the in-flight window is full.
    """

    def __init__(self, capture: Capture, key: ScopeKey, verifier: Verifier, *, when_slow: bool) -> None:
        LayerHooks.__init__(self, capture, key, when_slow=when_slow)
        self.layer, self.stream = f"layer {key.layer} ({key.name})", capture.offloader.device.stream
        self._unpack = partial(_unpack, capture, verifier)
        self._calls: dict[object, _Call] = {}  # keys: the storage of the output, and its node

    def __enter__(self) -> None:
        LayerHooks.__enter__(self)
        _wrap_classes()
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036
        TorchFunctionMode.__exit__(self, *error)  # type: ignore[no-untyped-call]
        LayerHooks.__exit__(self, *error)
        self._calls.clear()  # calls refer to tensors that autograd has not saved

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        # The compiler traces through this code, and compiles the same graph as without a mode.
        if function in CHEAP and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.note(function, args, kwargs, output)
        return output

    @untraced
    def pack(self, tensor: Tensor) -> Any:
        """Save a tensor, or the arguments of the call that computed the tensor."""
        call = self._call_of(tensor)
        if call is None or not call.save_arguments(self._pack_argument):
            return super().pack(tensor)
        if call.digest is None:
            call.cost, call.digest = 0, mix(fold(viewed(tensor.untyped_storage(), call.view)))
            key = ActivationKey(self._key, next(self._numbers))
            self.capture.trace.activations.append(ActivationTrace(key, call.nbytes, Treatment.REBUILT))
            self.capture.trace.rebuilt_bytes += call.nbytes
        return _Remade(call, tensor)

    def _pack_argument(self, tensor: Tensor) -> object:
        """Save an argument of a recorded call. The trace lists the argument in :attr:`StepTrace.sources`."""
        activations = self.capture.trace.activations
        count = len(activations)
        packed = super().pack(tensor)
        if isinstance(packed, Packed) and len(activations) > count:
            self.capture.trace.sources.append(activations.pop())
        return packed

    def note(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call of a cheap function, if its arguments take fewer bytes than its output."""
        is_plain = isinstance(output, Tensor) and self.understands(output, self.capture.device)
        if not is_plain or output._version or output.nbytes < self.capture.min_tensor_bytes:
            return
        given, storage = {**dict(enumerate(args)), **kwargs}, output.untyped_storage()
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        is_odd = any(x is output or x.is_inference() or not self.understands(x, x.device) for x in tensors)
        if not is_odd and output.is_contiguous() and output.nbytes == storage.nbytes():
            taken = {key: self._argument(value) for key, value in given.items()}
            call = _Call(function, taken, output, self)
            if call.cost < call.nbytes and call.depth <= DEEPEST:
                self._calls[storage._cdata] = self._calls[output.grad_fn] = call

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        cost = 0 if self._is_saved(value) else value.untyped_storage().nbytes()
        return _Argument(value, self._call_of(value), view_of(value), cost)

    def _call_of(self, tensor: Tensor) -> _Call | None:
        """Return the recorded call that computed a tensor, or that computed the base of a view.

        Return ``None`` if no call was recorded, or if the tensor stays in memory anyway.
        """
        if not self.understands(tensor, self.capture.device) or self._is_saved(tensor):
            return None
        cast: Any = tensor if tensor._base is None else tensor._base
        if cast.grad_fn is not None and cast.grad_fn not in self._calls and "ToCopy" in cast.grad_fn.name():
            # A ``TorchFunctionMode`` does not see the casts of autocast, so the cast is recorded here.
            node, _ = cast.grad_fn.next_functions[0]
            made = self._calls.get(node)
            source = _Argument(cast, made, made.view, 0) if made else getattr(node, "variable", None)
            if source is not None:
                self.note(Tensor.to, (source, cast.dtype), {"copy": True}, cast)
        call = self._calls.get(tensor.untyped_storage()._cdata)
        return call if call is not None and call.is_of(tensor) else None

    def _is_saved(self, tensor: Tensor) -> bool:
        capture, storage = self.capture, tensor.untyped_storage()
        static = storage in capture.static or any(isinstance(x, nn.Parameter) for x in (tensor, tensor._base))
        is_known = capture.is_kept(storage) or capture.find(storage, tensor) is not None
        return static or is_known or tensor.nbytes < capture.min_tensor_bytes


class _Call:
    """A recorded call whose output can be computed again.

    The object keeps neither the output nor the saved arguments alive.

    Args:
        function: The function that was called.
        given: The positional and keyword arguments, with an :class:`_Argument` in place of each tensor.
        output: The return value of the call.
        hooks: The hooks of the layer that runs.

    Attributes:
        cost: Bytes of the arguments that must be saved in place of the output.
        depth: Length of the longest chain of calls that rebuilds the output.
        digest: Digest of the output; ``None`` if autograd has not saved the output.
        waiting: Saved views of the output that backward has not used yet.
    """

    def __init__(self, function: Any, given: dict[Any, Any], output: Tensor, hooks: Any) -> None:
        self._function, self._given, self.nbytes = function, given, output.nbytes
        self._taken = {key: each for key, each in given.items() if isinstance(each, _Argument)}
        self.cost: int = sum(each.cost for each in self._taken.values())
        self.depth: int = 1 + max((each.depth for each in self._taken.values()), default=0)
        self.name = f"the output of {function.__name__} in {hooks.layer}"
        self.digest: Tensor | None = None
        self.waiting: weakref.WeakSet[_Remade] = weakref.WeakSet()
        self._held: torch.UntypedStorage | None = None
        self._probe, self.view = version_probe(output), view_of(output)
        self._alive, self._stream = weakref.ref(output.untyped_storage()), hooks.stream()
        kind = output.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def is_of(self, tensor: Tensor) -> bool:
        return self._alive() is tensor.untyped_storage() and tensor._version == self._probe._version == 0

    def save_arguments(self, pack: Callable[[Tensor], object]) -> bool:
        return all(each.save(pack) for each in self._taken.values())

    def storage(self, capture: Capture, verifier: Verifier) -> torch.UntypedStorage:
        """Return the output's storage. If the original storage is not valid, compute the output again."""
        found, stream = self._alive(), capture.offloader.device.stream()
        # The owner may have freed the memory of a storage that still exists. On another stream, the bytes of
        # a storage may not be ready.
        if found is None or not found.nbytes() or self._probe._version or stream != self._stream:
            made = self._make(capture, verifier)
            if self.digest is not None:
                verifier.add(self.name, mix(fold(made)) != self.digest)
            found = made.untyped_storage()
            self._alive, self._stream = weakref.ref(found), stream
        self._held = found if self.waiting else None
        return found

    def _make(self, capture: Capture, verifier: Verifier) -> Tensor:
        kind, dtype, enabled = self._autocast
        values = self._given | {key: x.value(capture, verifier, self) for key, x in self._taken.items()}
        args = [values.pop(key) for key in self._given if isinstance(key, int)]
        with torch.no_grad(), torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False):
            return self._function(*args, **values)  # type: ignore[no-any-return]


class _Argument:
    """A tensor argument of a recorded call. The argument is saved, or computed by another recorded call."""

    def __init__(self, tensor: Tensor, maker: _Call | None, view: View, cost: int) -> None:
        self._maker, self._tensor, self._view = maker, None if maker is not None else tensor, view
        self.cost, self.depth = (cost, 0) if maker is None else (maker.cost, maker.depth)
        self._version, self._needs_grad = tensor._version, tensor.requires_grad
        self._packed: Any = None

    def save(self, pack: Callable[[Tensor], object]) -> bool:
        """Save the argument. Return False if the argument was changed in place after the call."""
        if self._maker is not None:
            return self._maker.save_arguments(pack)
        tensor, self._tensor = self._tensor, None
        if tensor is not None and tensor._version == self._version:
            self._packed = pack(tensor)
        return self._packed is not None

    def value(self, capture: Capture, verifier: Verifier, call: _Call) -> Tensor:
        if self._maker is not None:
            return viewed(self._maker.storage(capture, verifier), self._view)
        purpose = f"to compute {call.name} again, as placement 'offload-remat' does"
        check_version(self._packed.probe, self._packed.version, purpose)
        # The result of a compiled function may depend on whether its arguments require a gradient.
        return capture.unpack(self._packed).detach().requires_grad_(self._needs_grad)


class _Remade:
    """A saved tensor that is a view of the output of a recorded call."""

    def __init__(self, call: _Call, tensor: Tensor) -> None:
        self.call, self.view, self.probe = call, view_of(tensor), version_probe(tensor)
        call.waiting.add(self)


def _unpack(capture: Capture, verifier: Verifier, packed: Any) -> Tensor:
    if not isinstance(packed, _Remade):
        return capture.unpack(packed)
    check_version(packed.probe, 0, packed.call.name)
    packed.call.waiting.discard(packed)
    return restore(packed.call.storage(capture, verifier), packed.view, packed.probe)


def _wrap_classes() -> None:
    """Wrap the imported classes of :data:`_CLASSES`, so that a ``TorchFunctionMode`` sees their calls."""
    for module, names in _CLASSES:
        for name in names.split() if module in sys.modules else ():
            found: Any = getattr(sys.modules[module], name, None)
            if found is not None and found not in _wrapped:
                # Dispatch only to the class and to the mode. Tensor subclasses then see no additional calls.
                shown = wrap_torch_function(lambda owner, *_, **__: (owner,))(found.apply.__func__)
                shown.__name__ = name
                CHEAP.add(shown)
                _wrapped[found] = shown
                found.apply = classmethod(shown)


def unwrap_classes() -> None:
    """Remove the wrappers of :data:`_CLASSES`. The next layer placed ``offload-remat`` wraps them again."""
    while _wrapped:
        found, shown = _wrapped.popitem()
        del found.apply
        CHEAP.remove(shown)
