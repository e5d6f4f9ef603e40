"""The command ``tba-offload estimate``.

The command estimates the cost of each placement without data and without a GPU. The model's own code runs
forward and backward on tensors that have shapes but no data. The estimate uses the hooks and the offloader of
a real session. A dispatch mode counts the live bytes and the FLOPs of each operation, and estimates the time
from the FLOPs. Transfers take the simulated time that the drives would need.
"""

from __future__ import annotations

import json
import sys
import warnings
from bisect import insort
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from tba_offload.capture.gradients import Gradients
from tba_offload.capture.hooks import Capture, LayerHooks
from tba_offload.capture.rematerialize import RematerializingHooks, unwrap_classes
from tba_offload.capture.trace import ScopeKey
from tba_offload.config import OffloadConfig
from tba_offload.days import bytes_per_day
from tba_offload.device import Device, blank, default_device
from tba_offload.device.meters import FITTING, LiveBytes
from tba_offload.errors import ConfigError, TbaError, UnsupportedError, required
from tba_offload.formatting import layers_by_placement, readable_rate, readable_size
from tba_offload.layers.find import find_layers
from tba_offload.layers.graph import first_differentiable
from tba_offload.placements import Placement, Staying
from tba_offload.planner.measure import StepObservation, profile_of
from tba_offload.planner.model import Bandwidth, DeviceShare, Limits, Plan, Prediction
from tba_offload.planner.solve import Case, solve
from tba_offload.planner.window import Tier, drives_share, is_for_host
from tba_offload.recompute.arguments import put_together, take_apart
from tba_offload.recompute.digest import digest
from tba_offload.report import plans, text
from tba_offload.report.log import StepRecord
from tba_offload.store.base import BLOCK, Extent
from tba_offload.torch_private import TorchDispatchMode, tensors_without_data, tree_leaves
from tba_offload.transfer.offloader import Offloader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tba_offload.capture.trace import ScopeTrace
    from tba_offload.store.pool import Transfer

_SET = torch.ops.aten.set_.source_Storage_storage_offset
WAYS = "keep", "offload", "offload-remat", "recompute", "recompute-offload"
LENGTHS = [2**power for power in range(7, 21)]
"""Sequence lengths for which ``recompute-offload`` is estimated."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def run_on_console(
    *,
    bandwidth: Bandwidth,
    device_bytes: int | None,
    rated: int | None,
    as_json: bool,
    base_bits: int | None,
    **model: Any,
) -> None:
    """Print the cost of each placement. See ``tba-offload estimate --help`` for the output."""
    with dry_model(bandwidth=bandwidth, **model) as dry:
        names = dry.names
        dry.run(Plan((Placement.OFFLOAD,) * len(names)))
        limits = Limits(window=dry.window)
        placed = {way: Plan((Placement(way),) * len(names), window=limits.window) for way in WAYS}
        steps = {way: dry.step(plan) for way, plan in placed.items()}
        window = readable_size(limits.window or 0)
        # The weights of one layer are in use while the weights of the next layer are read.
        frozen = dry.frozen_bytes(base_bits)
        resident = max(map(sum, pairwise([*frozen, 0])), default=0)
        notes, share = [f"{len(names)} layers. Drives: {bandwidth}. In-flight window: {window}."], None
        if device_bytes is not None:
            gradients = dry.profile.gradient_bytes
            base = dry.model.get_memory_footprint() + sum(frozen) - sum(dry.frozen_bytes()) + 2 * gradients
            share = DeviceShare(int(FITTING * device_bytes), base, gradients)
            if share.left <= 0 and frozen:
                notes += [
                    "The frozen weights do not fit into the memory of the device, so they are offloaded."
                ]
                share = replace(share, base_bytes=base - sum(frozen) + resident)
            if share.left <= 0:
                raise ConfigError(f"no memory is left for activations: {share}. Choose a larger device")
            case = Case(dry.profile, bandwidth, limits.on_device(share), (Placement.AUTO,) * len(names))
            # The profile has only activations. Each step shows the memory beside activations.
            beside = (steps[way].activation_peak - case.played(placed[way]).activation_peak for way in WAYS)
            placed["fit"] = solve(replace(case, profile=replace(dry.profile, headroom=max(beside))))
            steps["fit"] = dry.step(placed["fit"])
            notes += [
                f"{readable_size(share.budget)} are left for activations: {share}.",
                "Until backward allocates gradients, activations may use the memory reserved for gradients.",
                f"The row 'fit' uses this plan: {layers_by_placement(names, placed['fit'].placements)}.",
            ]
        rows, forward = [], dry.forward_seconds
        if frozen:
            reads, rate = readable_size(2 * sum(frozen)), readable_rate(sum(frozen) / forward)
            notes += [
                f"The layers have {readable_size(sum(frozen))} of frozen weights.",
                f"With 'frozen: offload', {readable_size(resident)} of the frozen weights stay in memory.",
                f"Each step reads {reads} of frozen weights. To avoid waits, the drives must read {rate}.",
            ]
        lengths = [length for length in LENGTHS if length <= _longest(dry.model.config)]
        carried = dry.carried_from(lengths, bandwidth)
    for way, step in steps.items():
        # Backward finds some bytes in memory before these are written. Their number depends on the speed of
        # the drives, so all bytes count that a step sends.
        sent, day = step.sent_bytes, bytes_per_day(step.sent_bytes, step.seconds)
        row = {
            "placement": way,
            "placements": placed[way].placements,
            "activation_peak_bytes": step.activation_peak,
            "seconds": step.seconds,
            "times_keep": step.seconds / steps["keep"].seconds,
            "drives_need": sent / forward if sent else None,
            "written_bytes": sent,
            "written_bytes_per_day": day,
            "years": rated / day / 365 if rated and day else None,
            "fits": None if share is None else step.peak_bytes <= share.left,
        }
        rows.append(row)
    if as_json:
        found = {
            "layers": names,
            "in_flight_bytes": limits.window,
            "carried_from": carried,
            "frozen_bytes": sum(frozen),
            "placements": rows,
        }
        click.echo(json.dumps(found, indent=2))
    else:
        shortest = f"{carried:,} tokens" if carried else f"more than {max(lengths, default=0):,} tokens"
        answer = f"From this sequence length on, these drives do not delay recompute-offload: {shortest}."
        text.show(*notes, plans.placements_table(rows), answer)


@contextmanager
def dry_model(*, flops: float, bandwidth: Bandwidth, **model: Any) -> Iterator[DryModel]:
    """Yield a model whose tensors have no data.

    Args:
        flops: FLOPs per second that the device reaches in training.
        bandwidth: Rates of the drives.
        model: Arguments of :func:`create`.

    Raises:
        ConfigError: The file is not a configuration of transformers.
        MissingDependencyError: transformers is not installed.
        UnsupportedError: The model cannot run on tensors without data, no layers are found, or backward
            reaches no layer.
    """
    # ``digest`` caches a tensor, and this tensor needs data.
    digest(torch.zeros(1, device=default_device().torch_device))
    blank.cache_clear()
    try:
        # The address of a tensor without data is 0, and PyTorch warns of its use.
        with warnings.catch_warnings(action="ignore", category=UserWarning), tensors_without_data() as mode:
            yield DryModel(*create(**model), flops, _Machine(bandwidth), mode)
    except TbaError:
        raise
    except Exception as error:  # the code of the model may raise any error on tensors without data
        then = "Instead, train three steps with 'keep' and a run log, and run tba-offload plan"
        raise UnsupportedError(f"the model cannot run on tensors without data: {error!r}. {then}") from error
    finally:
        unwrap_classes()
        blank.cache_clear()


def create(
    *, config: str | None, dtype: str, batch: int, sequence: int, lora: int | None = None, **sizes: int
) -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers, and the arguments of its forward for a micro-batch.

    Args:
        config: Path of a configuration of transformers, or of the folder of ``config.json``.
        dtype: Dtype of the model, a key of :data:`DTYPES`.
        batch: Number of sequences in a micro-batch.
        sequence: Number of tokens in a sequence.
        lora: Rank of the LoRA matrices that are added to all linear modules of the layers. With LoRA, the
            model's own weights are frozen. ``None`` trains all weights.
        sizes: Arguments of ``transformers.LlamaConfig``, used if ``config`` is ``None``.
    """
    with required("transformers", "estimate", extra="transformers"):
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
    found.use_cache = False
    usual = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    name = next(iter(found.architectures or ()), getattr(usual, "__name__", ""))
    kind: Any = getattr(transformers, name, None)
    if kind is None or not name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM")):
        known = 'a language model with one stack of layers, such as "architectures": ["LlamaForCausalLM"]'
        raise UnsupportedError(f"the configuration names the class {name!r}. The class must be {known}")
    if sequence > (most := _longest(found)):
        known = found.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ConfigError(f"--sequence {sequence}: {name} has {most} positions ({known}). Use at most {most}")
    # Some functions that initialize weights read the values of the weights. transformers reads the source of
    # a model's module to learn which implementations of experts the model supports.
    own = {"initialize_weights": lambda _: None, "__module__": kind.__module__}
    unfilled: Any = type(name, (kind,), own)
    with torch.device(default_device().torch_device):
        try:
            model = unfilled._from_config(found, dtype=DTYPES[dtype]).train()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"the configuration does not create a model: {error}") from error
        if lora is not None:
            _add_lora(model, lora)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    # Without a cache, a model reads values to decide whether it needs a mask. This cache holds nothing.
    holds_nothing = {"update": lambda _, keys, values, *__, **___: (keys, values)}
    for given in signature(kind.forward).parameters.keys() & {"cache", "past_key_values"}:
        inputs[given] = type("NoCache", (transformers.DynamicCache,), holds_nothing)()
    return model, inputs


def _add_lora(model: Any, rank: int) -> None:
    """Freeze the model, and add LoRA matrices, which peft cannot create without data."""
    model.requires_grad_(requires_grad=False)
    for layer in find_layers(model).layers:
        for linear in [each for each in layer.module.modules() if isinstance(each, torch.nn.Linear)]:
            sizes = (linear.in_features, rank), (rank, linear.out_features)
            some = (torch.nn.Linear(*each, bias=False, dtype=linear.weight.dtype) for each in sizes)
            linear.lora = torch.nn.Sequential(*some)
            linear.register_forward_hook(lambda module, given, output: output + module.lora(*given))


def _longest(config: Any) -> int:
    """Return the largest sequence length of a model in tokens. Models with rotary positions have no limit."""
    is_rotary = hasattr(config, "rope_parameters") or hasattr(config, "rope_theta")
    return sys.maxsize if is_rotary else getattr(config, "max_position_embeddings", sys.maxsize)


def _flops_of(function: Any, args: Any, kwargs: Any, output: object) -> int:
    """Return the FLOPs of an operation; 0 if no formula is known.

    PyTorch has no formula for attention on a CPU, so its formula for the GPU kernel is used. The formula for
    grouped matrix products (``_grouped_mm``) is in this function, because PyTorch has none.
    """
    name = getattr(getattr(function, "_overloadpacket", None), "__name__", "none").replace("_for_cpu", "")
    if name == "_grouped_mm":
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    formula = flop_registry.get(getattr(torch.ops.aten, name, None))
    if formula is None:
        return 0
    given = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
    # PyTorch counts the whole square of scores. Causal kernels compute half of it.
    return int(formula(*args, **kwargs, out_val=output)) // (2 if given.get("is_causal") else 1)


class _Tier(Tier):
    """Simulated drives, or simulated host memory.

    Attributes:
        bandwidth: Write and read rates, and the capacity.
        free_at: Simulated times at which the last read and the last write end.
    """

    def __init__(self, bandwidth: Bandwidth) -> None:
        super().__init__(0, 0, bandwidth.write)
        self.bandwidth, self.free_at = bandwidth, [0.0, 0.0]


class _Machine(Device):
    """A simulated device and a simulated store in one object.

    Attributes:
        clock: Simulated time in seconds, including compute and waits for I/O.
        live: Counter of the bytes of live storages.
    """

    torch_device = torch.device("meta")  # storages without data are on this device
    alignment, beside, spill_bytes, take_outages = BLOCK, None, 0, tuple
    completed: Any

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.clock, self.live, self._share = 0.0, LiveBytes(self.torch_device), 0.0
        self._tiers = [_Tier(bandwidth), _Tier(bandwidth.host or replace(bandwidth, capacity=0))]
        self._queue: list[tuple[float, float, int, Any]] = []  # ends and starts of transfers, ordered by end
        self.read, self.write = partial(self._submit, writes=False), partial(self._submit, writes=True)
        self.resume = self.trim = lambda *_: None

    def mark(self) -> float:
        """Return the simulated time in seconds."""
        return self.clock

    def _submit(self, transfers: Sequence[Transfer], *, writes: bool) -> None:
        for each in transfers:
            memory, each.is_write = each.memory, writes
            self.live.add_storage(memory.storage)  # type: ignore[union-attr]
            each.drive = self._place(each.nbytes) if each.extent is None else each.extent.drive
            tier = self._tiers[each.drive]
            began = max(self.clock, tier.free_at[writes])
            rate = tier.bandwidth.write if writes else tier.bandwidth.read
            tier.free_at[writes] = began + each.nbytes / rate
            insort(self._queue, (tier.free_at[writes], began, id(each), each))
            if writes:
                tier.held += each.nbytes
                tier.pending += each.nbytes

    def _place(self, nbytes: int) -> int:
        drives, host = self._tiers
        has_room = host.held + nbytes <= (host.bandwidth.capacity or 0)
        return int(has_room and is_for_host(host, drives, self.spill_bytes, self._share))

    def beyond_host(self, nbytes: int) -> int:
        """Return how many bytes do not fit into host memory if a step writes ``nbytes``."""
        capacity = self._tiers[1].bandwidth.capacity or 0
        self._share = drives_share(nbytes, capacity)  # for the next step, as in training
        return max(nbytes - capacity, 0)

    def release(self, extent: Extent) -> None:
        self._tiers[extent.drive].held -= extent.nbytes

    def cancel(self, transfer: Transfer) -> bool:
        """Cancel a transfer that has not started; return False if the transfer has started."""
        waiting = [entry for entry in self._queue if entry[-1] is transfer and entry[1] > self.clock]
        for entry in waiting:
            self._queue.remove(entry)
            self._end(transfer)
            transfer.memory = None
            if transfer.is_write:
                self._tiers[transfer.drive].held -= transfer.nbytes
        return bool(waiting)

    def _end(self, transfer: Transfer) -> None:
        if transfer.is_write:
            self._tiers[transfer.drive].pending -= transfer.nbytes
            transfer.memory = None
        transfer.finish()

    def wait(self, transfer: Transfer) -> None:
        while not transfer.is_done:
            self.clock = max(self.clock, self._queue[0][0])
            self.settle()

    def settle(self) -> None:
        """Complete the transfers whose simulated end time has passed."""
        while self._queue and self._queue[0][0] <= self.clock:
            transfer = self._queue.pop(0)[-1]
            if transfer.is_write:
                transfer.extent = Extent(0, 0, transfer.nbytes, drive=transfer.drive)
            self.completed.append(transfer)
            self._end(transfer)


class DryModel(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A model whose tensors have no data, with the hooks and the offloader of a real session.

    Attributes:
        model: The model, whose tensors have shapes but no data.
        names: Module names of the attached layers.
        profile: The :class:`StepProfile` of all steps so far; ``None`` before the first step.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], flops: float, machine: Any, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self._inputs, self._mode = model, inputs, mode
        self._machine, self._flops = machine, flops
        least = OffloadConfig().min_tensor_bytes
        self._capture = Capture(Offloader(machine, machine), min_tensor_bytes=least)
        self._capture.offloader.marks_stalls = True
        self._capture.device = model.device
        self._capture.static.refresh([model])
        self._verifier: Any = SimpleNamespace(add=lambda *_: None)  # there are no bytes to compare
        self._gradients = Gradients([model], machine.torch_device, lambda _: None)
        self.profile: Any = None
        layers = find_layers(model).layers
        self.names = tuple(layer.id.name for layer in layers)
        self._blocks = [layer.module for layer in layers]
        for index, layer in enumerate(layers):
            layer.module.forward = partial(self._call, index, layer.module.forward)

    def frozen_bytes(self, bits: int | None = None) -> list[int]:
        """Return the bytes of frozen weights in each layer; an empty list without frozen weights.

        Args:
            bits: Bits of one quantized element, 4 or 8, in the format of bitsandbytes. By default, an element
                has the data type of the model.
        """
        # One fp32 number for each 64 elements scales 4-bit elements. The scales of 8-bit rows are small.
        wide = self.model.dtype.itemsize if bits is None else bits / 8 + (1 / 16 if bits == 4 else 0)
        frozen = [[each for each in block.parameters() if not each.requires_grad] for block in self._blocks]
        return [int(sum(wide * each.numel() for each in some)) for some in frozen] if any(frozen) else []

    @property
    def window(self) -> int:
        """Default size of the in-flight window in bytes, for the tensors of the profile."""
        saved = sum(self.profile.kind_of(layer).nbytes for layer in range(len(self.names)))
        return OffloadConfig().budget.window(saved, self.profile.largest_bytes) or 0

    @property
    def forward_seconds(self) -> float:
        """Total compute time of forward in all layers, in seconds."""
        layers = [slot.layer for slot in self.profile.slots if not slot.backward]
        return float(sum(self.profile.timing(layer, Placement.KEEP).forward for layer in layers))

    def carried_from(self, lengths: Sequence[int], bandwidth: Bandwidth) -> int | None:
        """Return the sequence length from which on ``recompute-offload`` does not wait for drives.

        The drives must write the inputs of all layers in the time of forward, and read the inputs in the time
        of backward. Inputs that fit into host memory or into the in-flight window are not written to drives.

        Args:
            lengths: Numbers of tokens in a sequence, in ascending order.
            bandwidth: Rates of the drives.
        """
        tokens, layers, carried = self._inputs["input_ids"], range(len(self.names)), None
        for length in reversed(lengths):
            self._inputs |= dict.fromkeys(("input_ids", "labels"), tokens.new_zeros(len(tokens), length))
            self.profile = None
            self.run(Plan((Placement.OFFLOAD,) * len(layers)))
            beyond = sum(self.profile.kind_of(layer).input_bytes for layer in layers) - self.window
            beyond -= (bandwidth.host and bandwidth.host.capacity) or 0
            backward = sum(self.profile.timing(layer, Placement.RECOMPUTE).backward for layer in layers)
            if not 0 < beyond <= min(bandwidth.write * self.forward_seconds, bandwidth.read * backward):
                # If this sequence needs no drives, then shorter sequences need no drives.
                return carried if beyond > 0 else lengths[0]
            carried = length
        return carried

    def step(self, plan: Plan) -> Prediction:
        """Return the predicted figures of the second step under a plan. The first step does not prefetch."""
        self._capture.learned.clear()
        if any(way.offloads for way in plan.placements):
            self.run(plan)
        return self.run(plan)

    def run(self, plan: Plan) -> Prediction:
        """Run one step under a plan, and return the predicted figures."""
        capture, offloader, machine = self._capture, self._capture.offloader, self._machine
        offloader.resize_window(plan.window)
        offloader.begin_step()
        capture.begin_step()
        trace, began, stats = capture.trace, machine.clock, offloader.window.stats
        trace.mark_times(machine)
        trace.gradients = lambda: self._gradients.live.nbytes
        self._placements, self._peak, self._whole = plan.placements, 0, 0
        with self:
            loss = self.model(**self._inputs).loss
            loss.backward()
        trace.backward_ended()
        trace.end_step()
        capture.end_step(failed=False, is_broken=False)
        gradients, seconds = self._gradients.live.nbytes, machine.clock - began
        self.model.zero_grad()
        record = StepRecord(step=1, seconds=0.0, gradient_peak_bytes=gradients)
        on_device = partial(trace.device_times, stats.marked_stalls)
        seen = StepObservation(trace, (), (), plan, record, began=0.0, on_device=on_device)
        self.profile = profile_of(seen, [(0, name) for name in self.names], self.profile, nets=True)
        if self.profile is None:
            raise UnsupportedError("backward reaches none of the layers, so nothing can be offloaded")
        stalled = sum(ended - began for began, ended in stats.marked_stalls)
        sent = machine.beyond_host(stats.offloaded + stats.forwarded)
        peaks = self._whole - gradients, stats.offloaded, self._peak
        return Prediction(seconds, stalled, *peaks, forwarded_bytes=stats.forwarded, sent_bytes=sent)

    def _call(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> object:
        trace, way = self._capture.trace, self._placements[index].as_run
        number = sum(scope.key.layer == index for scope in trace.scopes)
        key, given = ScopeKey(index, number, 0, self.names[index]), (*args, *kwargs.values())
        inputs = sum(x.nbytes for x in given if isinstance(x, Tensor) and x.requires_grad)
        scope = trace.begin_scope(key, way, inputs=inputs)
        hooks: Any = nullcontext()
        if way.rebuilds:
            hooks = RematerializingHooks(self._capture, key, self._verifier, when_slow=False)
        elif way.offloads:
            stays = Staying(way.percent).stays if way.percent < 100 else None
            hooks = LayerHooks(self._capture, key, when_slow=False, stays=stays, saves_inputs=way.recomputes)
        hooks.understands = lambda tensor, _: tensor.layout is torch.strided
        if way.recomputes:
            forward = partial(_recomputed, forward)
        with hooks:
            output = forward(*args, **kwargs)
        trace.end_scope(scope)
        tensor = first_differentiable(output)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.register_hook(partial(self._came_back, scope))  # type: ignore[no-untyped-call]
        return output

    def _came_back(self, scope: ScopeTrace, _: Tensor) -> None:
        self._capture.trace.backward_reached(scope)
        self._capture.schedule.reached()

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # the most frequent call
            return args[0].fake_device
        self._mode.cache_enabled = function is not _SET  # a cached call would keep the storage alive
        output, machine = function(*args, **(kwargs or {})), self._machine
        machine.clock += _flops_of(function, args, kwargs or {}, output) / self._flops
        for storage in (each.untyped_storage() for each in tree_leaves(output) if isinstance(each, Tensor)):
            if storage not in self._capture.static:
                machine.live.add_storage(storage)
        whole = machine.live.nbytes
        self._peak = max(self._peak, whole - self._gradients.live.nbytes)
        self._whole = max(self._whole, whole)
        machine.settle()
        return output


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> object:
    tensors: list[Tensor] = []
    layout = take_apart((args, kwargs), tensors)

    def run(*given: Tensor) -> object:
        args, kwargs = put_together(layout, given)
        return forward(*args, **kwargs)

    return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=False)
