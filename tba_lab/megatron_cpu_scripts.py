"""Megatron-LM's own training scripts without a GPU, in one process or in several with gloo.

``tba_lab.megatron_cpu`` is enough for a model and its layers. The scripts, the schedules and the
optimizers assume more; each function below replaces one of these assumptions, and says why. For trying things
out and for tests: it is refused where a GPU is present.

``python -m tba_lab.megatron_cpu_scripts SCRIPT ARGUMENTS`` runs a script so and changes nothing else: for
checkouts that are patched, and for comparisons.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.spawn
import sys
import time
import types
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from tba_lab.fused_adam import FusedAdam
from tba_lab.megatron_cpu import CPU, install, replace

if TYPE_CHECKING:
    from collections.abc import Callable

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randperm", "tril_indices"),
)


def install_for_scripts() -> None:
    """Make the training scripts run on the CPU for the rest of the process.

    Raises:
        MissingDependencyError: megatron-core is not installed.
        UnsupportedError: A GPU is present.
    """
    _no_compilation()  # first: megatron-core asks for it when it is imported
    _no_triton_kernels()
    install()
    for substitute in _SUBSTITUTIONS:
        substitute()


def _no_compilation() -> None:
    """Fused functions are compiled by torch.compile, which needs a compiler and minutes."""
    replace(torch, "compile", _uncompiled)


def _no_triton_kernels() -> None:
    """``megatron.training`` imports kernels for batch invariance, which need triton, and uses none."""
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    module = types.ModuleType(name)
    module.__getattr__ = _kernel  # type: ignore[method-assign]
    module.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    sys.modules[name] = module


def _one_device() -> None:
    """Let starting up asks whether there is a device, and skips the groups where there is none."""
    real = torch.cuda.is_available
    starting = {"initialize_megatron", "parse_and_validate_args", "validate_args"}
    # For these functions only: for others, yes would mean the way of the GPU.
    replace(torch.cuda, "is_available", lambda: sys._getframe(1).f_code.co_name in starting or real())
    replace(torch.cuda, "device_count", lambda: 1)
    # The last name is of devices of AMD, which the compiler asks for where PyTorch is not built for CUDA.
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=16 << 30, multi_processor_count=1, gcnArchName="cpu"
    )
    replace(torch.cuda, "get_device_properties", lambda *_: properties)
    replace(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    replace(torch.cuda, "get_device_name", lambda *_: "cpu")
    replace(torch.cuda, "mem_get_info", lambda *_: (8 << 30, 16 << 30))


def _cpu_literals() -> None:
    """Tensors are created on, and moved to, a device that is written into the code as "cuda"."""
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        replace(owner, "cuda", lambda self, *_, **__: self)
        replace(owner, "to", _moved_to_cpu(owner.to))
    replace(torch.Tensor, "pin_memory", lambda self, *_, **__: self)


def _no_streams() -> None:
    """Streams, events and synchronisation: on a CPU everything is done when its call returns."""
    for name in ("synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect"):
        replace(torch.cuda, name, _nothing_named(name))
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated"):
        replace(torch.cuda, name, _nothing_named(name))
    replace(torch.cuda, "manual_seed_all", _nothing_named("manual_seed_all"))
    stream = _Stream()
    replace(torch.cuda, "Stream", _Stream)
    replace(torch.cuda, "Event", _Event)
    replace(torch.cuda, "current_stream", lambda *_: stream)
    replace(torch.cuda, "default_stream", lambda *_: stream)
    replace(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    replace(torch.cuda, "is_current_stream_capturing", lambda: False)
    replace(torch.cuda.nvtx, "range_push", _nothing_named("range_push"))
    replace(torch.cuda.nvtx, "range_pop", _nothing_named("range_pop"))
    replace(torch.Tensor, "record_stream", _nothing_named("record_stream"))


def _cuda_types() -> None:
    """Optimizers sort parameters by the name of their type, and know those of CUDA only."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    replace(torch.Tensor, "type", type_)


def _parallel_norm() -> None:
    """Mark the parameters of the plain norm, which refuses sequence parallelism and needs nothing else."""
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    make = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            module = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in module.parameters():
            parameter.sequence_parallel = parallel
        return module

    replace(norm, "__new__", new)


def _kept_sends() -> None:
    """Pipeline stages free an output while gloo's thread still sends it; NCCL orders that on its stream."""
    send = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach().clone(), *args, **kwargs)

    replace(dist, "isend", isend)
    replace(dist.distributed_c10d, "isend", isend)


def _host_splits() -> None:
    """Experts exchange tokens by sizes that are taken to the host only if they are not there."""
    utilities = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    if not hasattr(utilities, "te_general_gemm"):
        replace(utilities, "te_general_gemm", None)
    original = getattr(utilities, "maybe_move_tensor_to_cpu", None)
    if original is None:
        return

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    replace(utilities, "maybe_move_tensor_to_cpu", moved)
    replace(dispatcher, "maybe_move_tensor_to_cpu", moved)


def _prebuilt_helpers() -> None:
    """Record that the datasets' helpers are compiled at start-up with the system's Python.

    Take those of the package.
    """
    name = "megatron.core.datasets.helpers_cpp"
    found = _installed_helpers()
    if found is not None and name not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, found)
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
    utilities = importlib.import_module("megatron.core.datasets.utils")
    replace(utilities, "compile_helpers", _nothing_named("compile_helpers"))


def _no_fused_kernels() -> None:
    """Start-up asks nvcc for its version before it builds kernels that are not used (0.16)."""
    with contextlib.suppress(ImportError):
        kernels = importlib.import_module("megatron.legacy.fused_kernels")
        replace(kernels, "load", _nothing_named("load"))


def _fused_adam() -> None:
    """Record that what a distributed optimizer saves of PyTorch's Adam it cannot load."""
    optimizers = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    replace(optimizers, "Adam", FusedAdam)
    replace(optimizers, "USING_PYTORCH_OPTIMIZER", value=False)
    replace(distributed, "Adam", FusedAdam)
    replace(distributed, "HAVE_APEX_OR_TE", value=True)


def _substituting_children() -> None:
    """Checkpoints are written by processes that start anew: they need all of this, but not the script."""
    prepare = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        data.pop("init_main_from_path", None)
        return data | {"init_main_from_name": "tba_lab.megatron_cpu_scripts"}

    replace(multiprocessing.spawn, "get_preparation_data", prepared)


_SUBSTITUTIONS: tuple[Callable[[], None], ...] = (
    _one_device,
    _cpu_literals,
    _no_streams,
    _cuda_types,
    _parallel_norm,
    _kept_sends,
    _host_splits,
    _prebuilt_helpers,
    _no_fused_kernels,
    _fused_adam,
    _substituting_children,
)


class _Stream:
    """A stream on which everything is done."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """There is nothing to wait for."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """Return the point that is reached already."""
        return event or _Event()

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """Everything is done."""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Event:
    """A point that is reached when it is recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time = 0.0

    def record(self, _: object = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def wait(self, _: object = None) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """Return it is reached."""
        return True

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds between two points."""
        return (later._time - self._time) * 1e3


def _nothing_named(name: str) -> Callable[..., None]:
    """Return a new function each time: PyTorch's compiler insists that no two names share one."""

    def nothing(*_: object, **__: object) -> None:
        return None

    nothing.__name__ = name
    return nothing


def _kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):  # what Python itself asks a module for
        raise AttributeError(name)
    return _nothing_named(name)


def _uncompiled(function: Any = None, *_: object, **__: object) -> Any:
    return function if function is not None else lambda given: given


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _moved_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return move


def _installed_helpers() -> str | None:
    """Return the compiled helpers of the installed megatron-core."""
    import site
    from pathlib import Path

    for directory in site.getsitepackages():
        for file in Path(directory).glob("megatron/core/datasets/helpers_cpp*.so"):
            return str(file)
    return None


if __name__ == "__main__":
    from tba_offload.megatron.launch import enter, run

    entered = enter(sys.argv[1:])
    install_for_scripts()
    run(entered)
elif __name__ == "__mp_main__":  # a process that one with the substitutions has started
    install_for_scripts()
