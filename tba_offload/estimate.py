"""The command ``tba-offload estimate``.

It estimates the cost of each placement from a step of a model without data.

The model's own code runs forward and backward on tensors that have only shapes, so autograd saves the same
tensors as in training. A dispatch mode sees each operation. It counts live bytes, and it counts FLOPs to
estimate the time. Bytes and times form a profile. In training, the planner measures this profile. The
planner's simulator then computes the cost.
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import click
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tba_offload.capture.hooks import SPARSE
from tba_offload.capture.rematerialize import RematerializingHooks, unwrap_classes
from tba_offload.capture.trace import (
    ActivationKey,
    ActivationTrace,
    ScopeKey,
    ScopeTrace,
    StepTrace,
    Treatment,
)
from tba_offload.capture.views import StaticStorages
from tba_offload.config import OffloadConfig
from tba_offload.days import bytes_per_day
from tba_offload.device import default_device
from tba_offload.errors import ConfigError, MissingDependencyError, TbaError, UnsupportedError
from tba_offload.formatting import layers_by_placement, readable_rate, readable_size, significant
from tba_offload.layers.find import find_layers
from tba_offload.layers.graph import first_differentiable
from tba_offload.placements import Placement
from tba_offload.planner.measure import SeenBeside, StepObservation, profile_of, with_beside
from tba_offload.planner.model import Bandwidth, Beside, DeviceShare, Limits, Plan, StepProfile
from tba_offload.planner.solve import Case, solve
from tba_offload.report import text
from tba_offload.report.log import StepRecord
from tba_offload.report.text import Table
from tba_offload.torch_private import TorchDispatchMode, tensors_without_data, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from tba_offload.layers.find import Layer

    Make = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]

_IDLE: Any = SimpleNamespace(
    raise_failures=int, device=SimpleNamespace(stream=int), window=SimpleNamespace(held_back=1)
)
"""An offloader without transfers."""


WAYS = "keep", "offload", "offload-remat", "recompute", "recompute-offload"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run_on_console(
    *,
    bandwidth: Bandwidth,
    flops: float,
    device_bytes: int | None,
    rated: int | None,
    as_json: bool,
    **model: Any,
) -> None:
    """Print the cost of each placement, as ``tba-offload estimate --help`` says."""
    profile, step = dry_run(model_of(**model), flops=flops, min_tensor_bytes=OffloadConfig().min_tensor_bytes)
    saved = sum(profile.kind_of(layer).nbytes for layer in range(len(step.names)))
    limits = Limits(window=OffloadConfig().budget.window(saved, profile.largest_bytes))
    if device_bytes is not None:
        share = DeviceShare(device_bytes, step.weight_bytes + 2 * step.gradients, step.gradients)
        limits = limits.on_device(share)
    case = Case(profile, bandwidth, limits, (Placement.AUTO,) * len(step.names))
    plans = {way: case.uniform(Placement(way)) for way in WAYS}
    if device_bytes is not None:
        plans["fit"] = solve(case)
    rows = [_row(way, case, plan, step.beside[-1].whole, rated) for way, plan in plans.items()]
    if as_json:
        found = {"layers": step.names, "in_flight_bytes": limits.window, "placements": rows}
        click.echo(json.dumps(found, indent=2))
    else:
        text.show(*_parts(rows, step.names, case))


def _row(name: str, case: Case, plan: Plan, least: int, rated: int | None) -> dict[str, Any]:
    """Return the figures of a plan."""
    step, profile = case.played(plan), case.profile
    forward = sum(
        slot.gap + profile.timing(slot.layer, plan.placements[slot.layer]).forward
        for slot in profile.slots
        if not slot.backward
    )
    day = bytes_per_day(step.written_bytes, step.seconds)
    return {
        "placement": name,
        "placements": plan.placements,
        "activation_peak_bytes": max(step.activation_peak, least),
        "seconds": step.seconds,
        "times_keep": step.seconds / case.keep.seconds,
        "drives_need": step.sent_bytes / forward if step.sent_bytes else None,
        "written_bytes": step.written_bytes,
        "forwarded_bytes": step.forwarded_bytes,
        "written_bytes_per_day": day,
        "years": rated / day / 365 if rated and day else None,
        "fits": None if case.limits.device is None else case.fits(plan),
    }


def _parts(rows: list[dict[str, Any]], names: tuple[str, ...], case: Case) -> Iterator[Any]:
    """Yield the parts of the report for the terminal."""
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "Placement": ("placement", str),
        "Activation peak": ("activation_peak_bytes", readable_size),
        "Step s": ("seconds", significant),
        "x keep": ("times_keep", "{:.2f}".format),
        "Drives need": ("drives_need", readable_rate),
        "Written": ("written_bytes", readable_size),
        "TB a day": ("written_bytes_per_day", lambda nbytes: significant(nbytes / 1e12)),
        "Years": ("years", significant),
        "Fits": ("fits", lambda fits: "yes" if fits else "no"),
    }
    columns = {name: each for name, each in columns.items() if any(row[each[0]] is not None for row in rows)}
    cells = [
        ["-" if row[key] is None else words(row[key]) for key, words in columns.values()] for row in rows
    ]
    window = readable_size(case.limits.window or 0)
    yield f"{len(names)} layers; the drives: {case.bandwidth}; in-flight window {window}."
    if case.limits.device is not None:
        left, plan = readable_size(case.limits.budget or 0), rows[-1]["placements"]
        yield f"{left} are left for activations {case.limits.device}."
        yield "Activations may also use the room of gradients that do not exist yet."
        yield f"The row fit: {layers_by_placement(names, plan)}."
    yield Table((*columns,), cells, right=(*columns,)[1:])


def dry_run(make: Make, *, flops: float, min_tensor_bytes: int) -> tuple[StepProfile, DryStep]:
    """Return the profile of a step, and the step.

    Args:
        make: Creates the model and a function that runs its forward pass and returns the loss.
        flops: FLOPs that the device computes in a second.
        min_tensor_bytes: Storages with fewer bytes stay in memory.

    Raises:
        UnsupportedError: The model does not run without data, no layers are found, or backward reaches no
            layer.
    """

    def run(way: Placement, before: StepProfile | None) -> tuple[StepProfile, DryStep]:
        try:
            with tensors_without_data():
                step = DryStep(way, *make(), flops, min_tensor_bytes)
        except TbaError:
            raise
        except Exception as error:
            instead = "Instead, train three steps with 'keep' and a run log, and use tba-offload plan"
            raise UnsupportedError(f"the model does not run without data: {error!r}. {instead}") from error
        record = StepRecord(step=1, seconds=step.clock, gradient_peak_bytes=step.gradients)
        seen = StepObservation(step.trace, (), (), Plan(()), record, began=0.0)
        profile = profile_of(seen, [(0, name) for name in step.names], before, nets=True)
        if profile is None:
            raise UnsupportedError("backward reaches no layer, so there is nothing to offload")
        return profile, step

    # The first run shows which tensors offload-remat rebuilds, but holds tensors longer. Bytes are counted in
    # the second run.
    rebuilt, _ = run(Placement.OFFLOAD_REMAT, None)
    unwrap_classes()
    profile, step = run(Placement.OFFLOAD, replace(rebuilt, timings=({},) * len(rebuilt.kinds)))
    *beside, outside = step.beside
    keep = [Placement.KEEP] * len(beside)
    return with_beside(profile, SeenBeside(outside.forward, beside), keep), step


def model_of(*, config: str | None, dtype: str, batch: int, sequence: int, **numbers: Any) -> Make:
    """Return a function that creates a model of transformers and a function that returns its loss.

    Args:
        config: A configuration: a file, or the folder of ``config.json``.
        dtype: A key of :data:`DTYPES`.
        batch: Number of sequences or images of a micro-batch.
        sequence: Number of tokens of a sequence.
        numbers: Without ``config``, the ``layers``, ``hidden``, ``heads`` and ``vocab`` of a Llama.

    Raises:
        ConfigError: The file is not a configuration.
        MissingDependencyError: transformers is not installed.
        UnsupportedError: The configuration names no class, or the class needs other inputs.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependencyError("transformers", "estimate", extra="transformers") from error
    if config is None:
        found: Any = transformers.LlamaConfig(
            num_hidden_layers=numbers["layers"],
            hidden_size=numbers["hidden"],
            intermediate_size=-(-8 * numbers["hidden"] // 768) * 256,
            num_attention_heads=numbers["heads"],
            vocab_size=numbers["vocab"],
            architectures=["LlamaForCausalLM"],
        )
    else:
        try:
            found = transformers.AutoConfig.from_pretrained(config)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{config}: not a configuration of transformers: {error}") from error
    # A decoder without a cache reads values to decide whether it needs a mask. In other models, a cache only
    # takes memory.
    found.use_cache = not found.is_encoder_decoder
    name = next(iter(found.architectures or ()), "")
    kind = getattr(transformers, name, None)
    if kind is None or kind.main_input_name not in {"input_ids", "pixel_values"}:
        known = 'a class for text or images, such as "architectures": ["LlamaForCausalLM"]'
        raise UnsupportedError(f"the configuration names the class {name!r}. It must name {known}")

    def make() -> tuple[nn.Module, Callable[[], Tensor]]:
        with torch.device(default_device().torch_device):
            # Some functions that initialize weights read their values.
            with mock.patch.object(transformers.PreTrainedModel, "initialize_weights"):
                model = kind._from_config(found, dtype=DTYPES[dtype]).train()
            given = {"input_ids": torch.zeros(batch, sequence, dtype=torch.long)}
            labels = given["input_ids"]
            if kind.main_input_name == "pixel_values":
                side, channels = found.image_size, found.num_channels
                sides = (side, side) if isinstance(side, int) else side
                given = {"pixel_values": torch.zeros(batch, channels, *sides, dtype=model.dtype)}
            if "labels" in inspect.signature(model.forward).parameters:
                is_class = name.endswith(("ImageClassification", "SequenceClassification"))
                given["labels"] = torch.zeros(batch, dtype=torch.long) if is_class else labels
        return model, lambda: _loss(model(**given))

    return make


def _loss(output: Any) -> Any:
    loss = getattr(output, "loss", None)
    return output[0].float().sum() if loss is None else loss


def _flops_of(function: Any, args: Any, kwargs: Any, output: object) -> int:
    """Return the FLOPs of an operation; 0 if PyTorch has no formula for it.

    PyTorch has no formula for attention on a CPU, so the formula of the same kernel on a GPU is used.
    """
    name = getattr(getattr(function, "_overloadpacket", None), "__name__", "none").replace("_for_cpu", "")
    formula = flop_registry.get(getattr(torch.ops.aten, name, None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


class _RebuildingHooks(RematerializingHooks):
    """Hooks that record and keep the tensors that ``offload-remat`` would rebuild."""

    capture: Any

    def probe(self, _: Tensor) -> Any:
        return SimpleNamespace(_version=0)

    def understands(self, tensor: Tensor, _: object) -> bool:
        return tensor.layout is torch.strided

    def pack(self, tensor: Tensor) -> Any:
        call, step = self._call_of(tensor), self.capture
        if call is None or not call.save_arguments(partial(step.record, to=step.trace.sources)):
            return step.record(tensor)
        call.cost = 0
        return step.record(tensor, treatment=Treatment.REBUILT)


class DryStep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One simulated step. For hooks, this object has the interface of a session's capture.

    Attributes:
        names: Module names of the layers.
        weight_bytes: Bytes of parameters and buffers.
        clock: Seconds of compute.
        gradients: Bytes of gradients.
        beside: For each layer, the largest number of live bytes beside saved bytes. The last entry is for all
            other code.
    """

    def __init__(
        self,
        way: Placement,
        model: nn.Module,
        loss: Callable[[], Tensor],
        flops: float,
        min_tensor_bytes: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.min_tensor_bytes = next(model.parameters()).device, min_tensor_bytes
        self.offloader, self.static, self.trace = _IDLE, StaticStorages(), StepTrace()
        self.learned: dict[int, Any] = {}
        self.static.refresh([model])
        weights = {each.untyped_storage() for each in (*model.parameters(), *model.buffers())}
        self.weight_bytes = sum(storage.nbytes() for storage in weights)
        self.clock, self.gradients, self._flops, self._way = 1e-9, 0, flops, way
        self._saved: dict[int, ActivationTrace] = {}  # by the address of a storage
        self._alive: dict[int, object] = {}  # likewise
        self._inputs: set[int] = set()  # likewise; layers of a decoder share some of theirs
        self._bytes = Counter[ScopeKey]()  # that runs of layers have saved
        self._outside = self._now = ScopeTrace(ScopeKey(-1, 0, 0, ""), "keep", 0.0)
        self._live = self._held = self._peak = self._known = self._latest = self._unknown = 0
        self._is_backward = False
        layers = find_layers(model).layers
        self.names = tuple(layer.id.name for layer in layers)
        self.beside = [Beside()] * (len(layers) + 1)
        for index, layer in enumerate(layers):
            layer.module.forward = partial(self._call, index, layer, layer.module.forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
        with self, torch.autograd.graph.saved_tensors_hooks(self.record, self.unpack):
            found = loss()
            found.backward()  # type: ignore[no-untyped-call]
        self._turn(self._outside, found)

    # ---- saved tensors ---------------------------------------------------------------------------

    def record(
        self,
        tensor: Tensor,
        treatment: Treatment = Treatment.OFFLOADED,
        to: list[ActivationTrace] | None = None,
    ) -> tuple[Tensor, ActivationTrace | None]:
        """Keep a saved tensor. The tensor is an activation of the first layer that saves it."""
        storage, key = tensor.untyped_storage(), self._now.key
        address, nbytes = storage._cdata, storage.nbytes()
        if address not in self._saved and storage not in self.static:
            nbytes = tensor.nbytes if tensor.nbytes * SPARSE < nbytes else nbytes
            self._saved[address] = ActivationTrace(ActivationKey(key, 0), nbytes, treatment, self.clock)
            if self._now is not self._outside:
                self._bytes[key] += nbytes
                self._held += nbytes
                if nbytes < self.min_tensor_bytes:
                    self.trace.kept_bytes += nbytes
                else:
                    (self.trace.activations if to is None else to).append(self._saved[address])
        elif to is None and (found := self._saved.get(address)) in self.trace.sources:
            self.trace.sources.remove(found)
            self.trace.activations.append(found)
        return tensor.detach(), self._saved.get(address)

    def unpack(self, packed: tuple[Tensor, ActivationTrace | None]) -> Tensor:
        """Return a saved tensor, and record its first use."""
        tensor, found = packed
        if found is not None and found.unpacked_at is None:
            found.unpacked_at = self.clock
            if found.key.scope == self._now.key:
                self._known -= self._latest  # an offloaded layer has one activation at a time in memory
                self._latest = found.nbytes
        return tensor

    def find(self, storage: torch.UntypedStorage, _: object = None) -> ActivationTrace | None:
        """Return the trace of a storage that is saved and not rebuilt."""
        found = self._saved.get(storage._cdata)
        return None if found is None or found.treatment is Treatment.REBUILT else found

    def is_kept(self, _: object) -> bool:
        """Return False, because only :meth:`find` shows which storages are saved."""
        return False

    # ---- layers ----------------------------------------------------------------------------------

    def _call(
        self, index: int, layer: Layer, forward: Callable[..., object], *args: Any, **kwargs: Any
    ) -> object:
        """Run a layer, and add hooks that show the start of its backward."""
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        number = sum(scope.key.layer == index for scope in self.trace.scopes)
        key = ScopeKey(index, number, 0, self.names[index])
        new = {each.untyped_storage()._cdata: each.nbytes for each in inputs}
        nbytes = sum(new[address] for address in new.keys() - self._inputs)
        self._inputs |= new.keys()
        scope = ScopeTrace(key, self._way, self.clock, nbytes, forward_gradients=self.gradients)
        self.trace.scopes.append(scope)
        self._turn(scope)
        if layer.id.number == number == 0 and inputs and inputs[0].grad_fn is not None:
            inputs[0].register_hook(partial(self._turn, self._outside))  # type: ignore[no-untyped-call]
        rebuilding: Any = _RebuildingHooks  # it needs no session here
        with rebuilding(self, key, None, when_slow=False) if self._way.rebuilds else nullcontext():
            output = forward(*args, **kwargs)
        scope.forward_ended = self.clock
        self._turn(self._outside)
        if (tensor := first_differentiable(output)) is not None and tensor.grad_fn is not None:
            tensor.register_hook(partial(self._turn, scope))  # type: ignore[no-untyped-call]
        return output

    def _turn(self, scope: ScopeTrace, gradient: Tensor | None = None) -> None:
        """End the current part of the step, and begin the forward or backward of a layer.

        It is the backward if there is a gradient.
        """
        last, most = self._now.key, self._peak - self._held
        seen = Beside(0, self._unknown, most) if self._is_backward else Beside(most + self._bytes[last])
        self.beside[last.layer] = self.beside[last.layer].at_least(seen)
        if self._is_backward:
            self._held -= self._bytes[last]
        if gradient is not None:
            scope.backward_began, scope.backward_gradients = self.clock, self.gradients
            self.trace.backward_ends.append(self.clock)
        self._now, self._is_backward = scope, gradient is not None
        self._peak, self._known, self._latest = self._live, self._held, 0
        self._unknown = self._live - self._held

    # ---- memory and time -------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.clock += _flops_of(function, args, kwargs or {}, output) / self._flops
        for storage in (each.untyped_storage() for each in tree_leaves(output) if isinstance(each, Tensor)):
            address, nbytes = storage._cdata, storage.nbytes()
            if address not in self._alive and storage not in self.static:
                self._alive[address] = weakref.ref(storage, partial(self._died, address, nbytes))
                self._live += nbytes
        self._peak = max(self._peak, self._live)
        self._unknown = max(self._unknown, self._live - self._known)
        return output

    def _died(self, address: int, nbytes: int, _: object) -> None:
        del self._alive[address]
        self._saved.pop(address, None)  # another storage may get this address
        self._live -= nbytes

    def _accumulated(self, parameter: Any) -> None:
        """Subtract a gradient from the live bytes, because it is not an activation."""
        storage = parameter.grad.untyped_storage()
        if self._alive.get(storage._cdata) is not None:
            self._alive[storage._cdata] = None
            self._live -= storage.nbytes()
            self.gradients += storage.nbytes()
