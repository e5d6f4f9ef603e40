"""The command ``tba-offload estimate``.

It estimates the cost of each placement from a step of a model without data.

The model's own code runs forward and backward on tensors that have only shapes, so autograd saves the same
tensors as in training. A dispatch mode sees each operation. It counts live bytes, and it counts FLOPs to
estimate the time. Bytes and times form a profile. In training, the planner measures this profile. The
planner's simulator then computes the cost.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tba_offload.capture import trace as traces
from tba_offload.capture.gradients import Gradients
from tba_offload.capture.rematerialize import RematerializingHooks, unwrap_classes
from tba_offload.capture.views import StaticStorages
from tba_offload.config import OffloadConfig
from tba_offload.days import bytes_per_day
from tba_offload.device import default_device
from tba_offload.device.meters import FITTING, LiveBytes
from tba_offload.errors import ConfigError, MissingDependencyError, TbaError, UnsupportedError
from tba_offload.formatting import layers_by_placement, readable_size
from tba_offload.layers.find import find_layers
from tba_offload.layers.graph import first_differentiable
from tba_offload.placements import Placement
from tba_offload.planner.measure import SeenBeside, StepObservation, profile_of, with_beside
from tba_offload.planner.model import Bandwidth, Beside, DeviceShare, Limits, Plan, StepProfile
from tba_offload.planner.solve import Case, solve
from tba_offload.report import plans, text
from tba_offload.report.log import StepRecord
from tba_offload.torch_private import TorchDispatchMode, tensors_without_data, tree_leaves

WAYS = "keep", "offload", "offload-remat", "recompute", "recompute-offload"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run_on_console(
    *, bandwidth: Bandwidth, device_bytes: int | None, rated: int | None, as_json: bool, **model: Any
) -> None:
    """Print the cost of each placement, as ``tba-offload estimate --help`` says."""
    profile, step = dry_run(**model)
    saved = sum(profile.kind_of(layer).nbytes for layer in range(len(step.names)))
    limits = Limits(window=OffloadConfig().budget.window(saved, profile.largest_bytes))
    window = readable_size(limits.window or 0)
    notes = [f"{len(step.names)} layers; the drives: {bandwidth}; in-flight window {window}."]
    case = Case(profile, bandwidth, limits, (Placement.AUTO,) * len(step.names))
    chosen = {way: case.uniform(Placement(way)) for way in WAYS}
    if device_bytes is not None:
        gradients = step.gradients.nbytes
        share = DeviceShare(int(FITTING * device_bytes), step.weight_bytes + 2 * gradients, gradients)
        if share.left <= 0:
            raise ConfigError(f"nothing is left for activations {share}. Choose a larger device")
        case = replace(case, limits=limits.on_device(share))
        chosen["fit"] = solve(case)
        notes += [
            f"{readable_size(share.budget)} are left for activations {share}.",
            "Activations may also use the room of gradients that do not exist yet.",
            f"The row fit: {layers_by_placement(step.names, chosen['fit'].placements)}.",
        ]
    rows = [_row(way, case, plan, step, rated) for way, plan in chosen.items()]
    if as_json:
        found = {"layers": step.names, "in_flight_bytes": limits.window, "placements": rows}
        click.echo(json.dumps(found, indent=2))
    else:
        text.show(*notes, plans.placements_table(rows))


def _row(name: str, case: Case, plan: Plan, step: DryStep, rated: int | None) -> dict[str, Any]:
    found = case.played(plan)
    # Backward finds some bytes in memory before they are written. Their number depends on the speed of the
    # drives, so all bytes count that a step sends.
    day = bytes_per_day(found.sent_bytes, found.seconds)
    return {
        "placement": name,
        "placements": plan.placements,
        "activation_peak_bytes": max(found.activation_peak, step.beside[-1].whole),
        "seconds": found.seconds,
        "times_keep": found.seconds / case.keep.seconds,
        "drives_need": found.sent_bytes / step.trace.forward_seconds() if day else None,
        "written_bytes": found.sent_bytes,
        "written_bytes_per_day": day,
        "years": rated / day / 365 if rated and day else None,
        "fits": None if case.limits.device is None else case.fits(plan),
    }


def dry_run(*, flops: float, **model: Any) -> tuple[StepProfile, DryStep]:
    """Return the profile of a step, and the step.

    Args:
        flops: FLOPs that the device computes in a second.
        model: The arguments of :func:`create`.

    Raises:
        ConfigError: The file is not a configuration.
        MissingDependencyError: transformers is not installed.
        UnsupportedError: The model does not run without data, no layers are found, or backward reaches no
            layer.
    """

    def run(way: Placement, before: StepProfile | None) -> tuple[StepProfile, DryStep]:
        try:
            with tensors_without_data():
                step = DryStep(way, *create(**model), flops)
        except TbaError:
            raise
        except Exception as error:
            instead = "Instead, train three steps with 'keep' and a run log, and use tba-offload plan"
            raise UnsupportedError(f"the model does not run without data: {error!r}. {instead}") from error
        record = StepRecord(step=1, seconds=step.clock, gradient_peak_bytes=step.gradients.nbytes)
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
    return with_beside(profile, SeenBeside(outside.forward, beside), (Placement.OFFLOAD,) * len(beside)), step


def create(*, config: str | None, dtype: str, batch: int, sequence: int, **sizes: int) -> tuple[Any, Tensor]:
    """Return a model of transformers, and the tokens of a micro-batch.

    Args:
        config: A configuration: a file, or the folder of ``config.json``.
        dtype: A key of :data:`DTYPES`.
        batch: Number of sequences of a micro-batch.
        sequence: Number of tokens of a sequence.
        sizes: Without ``config``, the sizes of a Llama, by transformers' names.
    """
    if find_spec("transformers") is None:
        raise MissingDependencyError("transformers", "estimate", extra="transformers")
    import transformers

    if config is None:
        wide = -(-8 * sizes["hidden_size"] // 768) * 256
        found: Any = transformers.LlamaConfig(**sizes, intermediate_size=wide)
        found.architectures = ["LlamaForCausalLM"]
    else:
        try:
            found = transformers.AutoConfig.from_pretrained(config)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{config}: not a configuration of transformers: {error}") from error
    found.use_cache = True  # a model without a cache reads values to decide whether it needs a mask
    usual = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    name = next(iter(found.architectures or ()), getattr(usual, "__name__", ""))
    kind: Any = getattr(transformers, name, None)
    if kind is None or not name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM")):
        known = 'a language model with one stack of layers, such as "architectures": ["LlamaForCausalLM"]'
        raise UnsupportedError(f"the configuration names the class {name!r}. It must name {known}")
    # Some functions that initialize weights read the values of the weights.
    unfilled: Any = type(name, (kind,), {"initialize_weights": lambda _: None})
    with torch.device(default_device().torch_device):
        try:
            model = unfilled._from_config(found, dtype=DTYPES[dtype]).train()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the configuration gives no model: {error}") from error
        return model, torch.zeros(batch, sequence, dtype=torch.long)


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

    probe: Any = staticmethod(lambda _: SimpleNamespace(_version=0))
    understands: Any = staticmethod(lambda tensor, _: tensor.layout is torch.strided)

    def pack(self, tensor: Tensor) -> Any:
        call, step = self._call_of(tensor), self.capture
        if call is None or not call.save_arguments(partial(step.record, treatment=None)):
            return step.record(tensor)
        call.cost = 0
        return step.record(tensor, traces.Treatment.REBUILT)

    def _is_saved(self, tensor: Tensor) -> bool:
        storage, step = tensor.untyped_storage(), self.capture
        found = step.traces.get(storage)
        is_saved = found is not None and found.treatment is not traces.Treatment.REBUILT
        return is_saved or storage in step.static or tensor.nbytes < step.min_tensor_bytes


class DryStep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One simulated step. For hooks, this object has the interface of a session's capture.

    Attributes:
        names: Module names of the layers.
        weight_bytes: Bytes of parameters and buffers.
        clock: Seconds of compute.
        gradients: Counts the bytes of gradients.
        beside: For each layer, the largest number of live bytes beside saved bytes. The last entry is for all
            other code.
    """

    def __init__(self, way: Placement, model: Any, tokens: Tensor, flops: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.min_tensor_bytes = model.device, OffloadConfig().min_tensor_bytes
        # An offloader without transfers.
        self.offloader = SimpleNamespace(raise_failures=int, flush=int, device=SimpleNamespace(stream=int))
        self.static, self.trace, self.learned = StaticStorages(), traces.StepTrace(), dict[int, Any]()
        self.static.refresh([model])
        where = torch.device("meta")  # storages without data are on this device
        self._live, self._saved = LiveBytes(where), LiveBytes(where)
        self._gradients = Gradients([model], where, lambda _: None)
        self.gradients, self.weight_bytes = self._gradients.live, model.get_memory_footprint()
        self.clock, self._flops, self._way = 1e-9, flops, way
        self.traces = weakref.WeakKeyDictionary[torch.UntypedStorage, traces.ActivationTrace]()
        self._now = self._outside = traces.ScopeTrace(traces.ScopeKey(-1, 0, 0, ""), way, 0.0)
        self._saved_before = self._peak = 0
        layers = find_layers(model).layers
        self.names = tuple(layer.id.name for layer in layers)
        self.beside = [Beside()] * (len(layers) + 1)
        for index, layer in enumerate(layers):
            layer.module.forward = partial(self._call, index, layer.module.forward)
        with self:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        self._turn(self._outside, loss)

    # ---- saved tensors ---------------------------------------------------------------------------

    def record(self, tensor: Tensor, treatment: Any = traces.Treatment.OFFLOADED) -> Tensor:
        """Keep a saved tensor. The tensor is an activation of the first layer that saves it.

        Args:
            tensor: The tensor.
            treatment: ``None`` if only other tensors are rebuilt from it.
        """
        storage = tensor.untyped_storage()
        if storage not in self.traces and storage not in self.static:
            nbytes = storage.nbytes()
            key, kind = traces.ActivationKey(self._now.key, 0), treatment or traces.Treatment.OFFLOADED
            found = self.traces[storage] = traces.ActivationTrace(key, nbytes, kind, self.clock)
            self._saved.add_storage(storage)
            if nbytes < self.min_tensor_bytes:
                self.trace.kept_bytes += nbytes
            else:
                (self.trace.sources if treatment is None else self.trace.activations).append(found)
        return tensor.detach()

    def unpack(self, tensor: Tensor) -> Tensor:
        """Return a saved tensor."""
        return tensor

    # ---- layers ----------------------------------------------------------------------------------

    def _call(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> object:
        """Run a layer, and add hooks that show the start of its backward."""
        number = sum(scope.key.layer == index for scope in self.trace.scopes)
        key, given = traces.ScopeKey(index, number, 0, self.names[index]), (*args, *kwargs.values())
        scope = traces.ScopeTrace(key, self._way, self.clock, forward_gradients=self.gradients.nbytes)
        scope.input_bytes = sum(x.nbytes for x in given if isinstance(x, Tensor) and x.requires_grad)
        self.trace.scopes.append(scope)
        self._turn(scope)
        if index == number == 0:
            self._watch(given, self._outside)
        rebuilding: Any = _RebuildingHooks  # it needs no session here
        hooks = torch.autograd.graph.saved_tensors_hooks(self.record, self.unpack)
        if self._way.rebuilds:
            hooks = rebuilding(self, key, None, when_slow=True)
        with hooks:
            output = forward(*args, **kwargs)
        scope.forward_ended = self.clock
        self._turn(self._outside)
        self._watch(output, scope)
        return output

    def _watch(self, output: object, scope: traces.ScopeTrace) -> None:
        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.register_hook(partial(self._turn, scope))  # type: ignore[no-untyped-call]

    def _turn(self, scope: traces.ScopeTrace, gradient: Tensor | None = None) -> None:
        """End the current part of the step, and begin the forward or backward of a layer.

        It is the backward if there is a gradient.
        """
        last = self._now.key.layer
        if not self._now.backward_began:  # all that the layer has saved is in memory now
            self.beside[last] = self.beside[last].at_least(Beside(self._peak - self._saved.nbytes))
        if gradient is not None:
            scope.backward_began, scope.backward_gradients = self.clock, self.gradients.nbytes
            self.trace.backward_ends.append(self.clock)
        self._now, self._saved_before, self._peak = scope, self._saved.nbytes, 0

    # ---- memory and time -------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.clock += _flops_of(function, args, kwargs or {}, output) / self._flops
        for storage in (each.untyped_storage() for each in tree_leaves(output) if isinstance(each, Tensor)):
            if storage not in self.static:
                self._live.add_storage(storage)
        live, layer = self._live.nbytes - self.gradients.nbytes, self._now.key.layer
        self._peak = max(self._peak, live)
        if self._now.backward_began:
            seen = Beside(0, live - self._saved.nbytes, live - self._saved_before)
            self.beside[layer] = self.beside[layer].at_least(seen)
        return output
