"""Support for Megatron-LM's training scripts without a GPU, in one process or in several processes with gloo.

The scripts, schedules and optimizers of Megatron 0.16 and 0.19 use a GPU in several places. Each function in
this module replaces one of these places. ``python -m tba_lab.megatron_cpu_scripts SCRIPT ARGUMENTS`` runs a
script with these replacements only, for patched checkouts and for comparisons.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import multiprocessing.spawn
import site
import sys
import time
import types
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.optim.adam import adam

from tba_lab.megatron_cpu import CPU, install, replace
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def install_for_scripts() -> None:
    """Make training scripts run on the CPU until the process ends. With a GPU, raise an error."""
    _no_compilers()  # first, because megatron-core uses compilers when it is imported
    install()
    _one_device()
    _cpu_literals()
    _no_streams()
    _cuda_types()
    _parallel_norm()
    _kept_sends()
    _host_splits()
    _prebuilt_helpers()
    _fused_adam()
    _substituting_children()


def _no_compilers() -> None:
    """Disable torch.compile, and replace triton kernels, which are imported and never called."""
    replace(torch, "compile", lambda given=None, *_, **__: given if given is not None else lambda made: made)
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    module = types.ModuleType(name)
    module.__getattr__ = _kernel  # type: ignore[method-assign]
    module.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    sys.modules[name] = module


def _one_device() -> None:
    """Report a device while scripts start, because scripts create process groups only if a device exists."""
    real = torch.cuda.is_available
    starting = {"initialize_megatron", "parse_and_validate_args", "validate_args"}
    # Only for these functions. Other functions would take their GPU path.
    replace(torch.cuda, "is_available", lambda: sys._getframe(1).f_code.co_name in starting or real())
    replace(torch.cuda, "device_count", lambda: 1)
    # gcnArchName belongs to AMD devices. The compiler reads this name in builds of PyTorch without CUDA.
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=16 << 30, multi_processor_count=1, gcnArchName="cpu"
    )
    replace(torch.cuda, "get_device_properties", lambda *_: properties)
    replace(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    replace(torch.cuda, "get_device_name", lambda *_: "cpu")
    replace(torch.cuda, "mem_get_info", lambda *_: (8 << 30, 16 << 30))


_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randperm", "tril_indices"),
)


def _cpu_literals() -> None:
    """Use the CPU wherever the code says "cuda"."""
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        replace(owner, "cuda", lambda self, *_, **__: self)
        replace(owner, "to", _on_cpu(owner.to))
    replace(torch.Tensor, "pin_memory", lambda self, *_, **__: self)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "to" and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


def _is_cuda(device: object) -> bool:
    return str(device).startswith("cuda") or type(device) is int


def _no_streams() -> None:
    """Replace streams, events and synchronization. On a CPU, work is finished when the call returns."""
    for name in (
        *("synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect", "manual_seed_all"),
        *("reset_peak_memory_stats", "reset_max_memory_allocated"),
    ):
        replace(torch.cuda, name, _nothing(name))
    stream = _Stream()
    replace(torch.cuda, "Stream", _Stream)
    replace(torch.cuda, "Event", _Event)
    replace(torch.cuda, "current_stream", lambda *_: stream)
    replace(torch.cuda, "default_stream", lambda *_: stream)
    replace(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    replace(torch.cuda, "is_current_stream_capturing", lambda: False)
    replace(torch.cuda.nvtx, "range_push", _nothing("range_push"))
    replace(torch.cuda.nvtx, "range_pop", _nothing("range_pop"))
    replace(torch.Tensor, "record_stream", _nothing("record_stream"))


def _nothing(name: str) -> Callable[..., None]:
    """Return a new function, because PyTorch's compiler does not allow two names for one function."""

    def nothing(*_: object, **__: object) -> None:
        return None

    nothing.__name__ = name
    return nothing


class _Event:
    """Event that is complete as soon as the event is recorded."""

    wait = synchronize = staticmethod(_nothing("wait"))

    def __init__(self, *_: object, **__: object) -> None:
        self.record()

    def record(self, _: object = None) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return (later._time - self._time) * 1e3


class _Stream:
    """Stream that never has pending work."""

    cuda_stream = 0
    device = CPU
    wait_stream = wait_event = synchronize = __init__ = __exit__ = staticmethod(_nothing("wait"))

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self


def _kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):  # Python itself looks for these names in a module
        raise AttributeError(name)
    return _nothing(name)


def _cuda_types() -> None:
    """Report CUDA tensor types, because optimizers sort parameters by tensor type."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return "torch.cuda." + original(self).rpartition(".")[2]

    replace(torch.Tensor, "type", type_)


def _parallel_norm() -> None:
    """Mark the parameters of the plain norm, so that the norm accepts sequence parallelism."""
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
    """Send copies, because pipeline stages free an output while gloo still sends it."""
    send = dist.isend

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach().clone(), *args, **kwargs)

    replace(dist, "isend", isend)
    replace(dist.distributed_c10d, "isend", isend)


def _host_splits() -> None:
    """Convert the token counts of experts, because the code expects the counts on another device."""
    utilities = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    if not hasattr(utilities, "te_general_gemm"):
        replace(utilities, "te_general_gemm", None)
    original = utilities.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    replace(utilities, "maybe_move_tensor_to_cpu", moved)
    replace(dispatcher, "maybe_move_tensor_to_cpu", moved)


def _prebuilt_helpers() -> None:
    """Use prebuilt dataset helpers and no fused kernels, because scripts would compile both."""
    name = "megatron.core.datasets.helpers_cpp"
    folders = map(Path, site.getsitepackages())
    built = [file for folder in folders for file in folder.glob("megatron/core/datasets/helpers_cpp*.so")]
    spec = spec_from_file_location(name, built[0]) if built and name not in sys.modules else None
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    utilities = importlib.import_module("megatron.core.datasets.utils")
    replace(utilities, "compile_helpers", _nothing("compile_helpers"))
    with contextlib.suppress(ImportError):  # 0.19 and later do not have this module
        kernels = importlib.import_module("megatron.legacy.fused_kernels")
        replace(kernels, "load", _nothing("load"))


def _substituting_children() -> None:
    """Install the replacements also in spawned processes, such as checkpoint writers."""
    prepare = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        data.pop("init_main_from_path", None)
        return data | {"init_main_from_name": "tba_lab.megatron_cpu_scripts"}

    replace(multiprocessing.spawn, "get_preparation_data", prepared)


def _fused_adam() -> None:
    """Use Apex's Adam. A distributed optimizer cannot load states that PyTorch's Adam has saved."""
    optimizers = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    replace(optimizers, "Adam", FusedAdam)
    replace(optimizers, "USING_PYTORCH_OPTIMIZER", value=False)
    replace(distributed, "Adam", FusedAdam)
    replace(distributed, "HAVE_APEX_OR_TE", value=True)


class FusedAdam(torch.optim.Optimizer):
    """Replacement for Apex's Adam and AdamW, with one step counter for each parameter group."""

    def __init__(self, params: Iterable[Any], *, adam_w_mode: bool = True, **options: Any) -> None:
        if options.pop("capturable", False):
            raise UnsupportedError("capturable is not supported: a CPU has no CUDA graphs. Remove the option")
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, defaults | options)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [each for each in group["params"] if each.grad is not None]
            names = ("exp_avg", "exp_avg_sq")
            for each, name in itertools.product(parameters, names):
                if name not in self.state[each]:
                    self.state[each][name] = torch.zeros_like(each)
            averages, squares = ([self.state[each][name] for each in parameters] for name in names)
            adam(
                parameters,
                [each.grad for each in parameters],
                averages,
                squares,
                [],
                [torch.tensor(group["step"] - 1.0) for _ in parameters],  # adam() increments these
                foreach=False,
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                maximize=False,
                **{name: group[name] for name in ("lr", "weight_decay", "eps")},
            )
        return loss


FusedAdam.__module__ = "apex.optimizers.fused_adam"

if __name__ == "__main__":
    from tba_offload.megatron.launch import enter, run

    entered = enter(sys.argv[1:])
    install_for_scripts()
    run(entered)
elif __name__ == "__mp_main__":  # a process spawned by a process with these replacements
    install_for_scripts()
