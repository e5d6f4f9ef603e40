"""What a run log is told: what the run is, and the figures of each step."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import torch

from tba_offload.config.policy import Placement
from tba_offload.plan.model import Plan
from tba_offload.report.log import RunHeader, StepRecord
from tba_offload.store.base import HOST_TIER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from tba_offload.config import OffloadConfig
    from tba_offload.config.policy import LayerId, Policy
    from tba_offload.session.figures import Times
    from tba_offload.session.parts import Parts
    from tba_offload.session.step import Step
    from tba_offload.session.world import World
    from tba_offload.store.base import DriveLoad
    from tba_offload.weights import WeightsMoved


def record_of(
    step: Step,
    times: Times,
    number: int,
    loads: Sequence[DriveLoad],
    weights: WeightsMoved | None,
    parts: Parts,
    *,
    loss: float | None,
) -> StepRecord:
    """Return what a step was like.

    Args:
        step: The step, which has ended.
        times: How long it took.
        number: Of the step.
        loads: What drives and host memory moved in it.
        weights: What frozen weights moved; ``None`` if none are offloaded.
        parts: What worked in it.
        loss: Its loss, if that is known by now.
    """
    # How long it took to give a device its work is not how long the work took.
    computed_in_time = not parts.device.runs_behind
    memory, meter = step.memory, step.memory.meter
    trace, stats = parts.capture.trace, parts.offloader.stats
    prediction = parts.planning.plan.prediction
    on_host = [load for load in loads if load.tier == HOST_TIER]
    return StepRecord(
        step=number,
        seconds=times.seconds,
        optimizer_seconds=times.optimizer_seconds,
        skipped=step.state.skipped,
        forward_seconds=trace.forward_seconds() if computed_in_time else None,
        backward_seconds=(trace.backward_seconds or None) if computed_in_time else None,
        stall_seconds=stats.stall_seconds,
        tokens=step.all_tokens,
        model_flops=step.model_flops,
        loss=loss,
        activation_peak_bytes=memory.peak_bytes,
        base_bytes=memory.base_bytes,
        earlier_outputs_bytes=parts.outputs.at_begin if memory.base_bytes is not None else None,
        peak_source=meter.source if meter is not None and memory.peak_bytes is not None else None,
        reserved_peak_bytes=memory.reserved_bytes,
        device_peak_bytes=memory.device_peak_bytes,
        activation_budget_bytes=parts.budget.of_activations,
        gradient_bytes=parts.gradients.live.take_added(),
        gradient_peak_bytes=parts.gradients.live.take_most(),
        state_bytes=memory.state_bytes if meter is not None else None,
        own_peak_bytes=stats.own_peak + trace.kept_bytes,
        resident_peak_bytes=parts.meters.resident.read(),
        gradients_allocated=memory.gradients_allocated,
        offloaded_bytes=stats.offloaded,
        read_bytes=stats.read,
        reread_bytes=stats.reread,
        rescued_bytes=stats.rescued,
        host_offloaded_bytes=sum(load.write.nbytes for load in on_host),
        host_read_bytes=sum(load.read.nbytes for load in on_host),
        forwarded_bytes=stats.forwarded,
        deduplicated_bytes=trace.deduplicated_bytes,
        rebuilt_bytes=trace.rebuilt_bytes,
        kept_bytes=trace.kept_bytes,
        recomputed_scopes=sum(Placement(scope.placement).recomputes for scope in trace.scopes),
        scopes=len(trace.scopes),
        in_flight_peak_bytes=stats.in_flight_peak,
        given_up_bytes=stats.given_up,
        held_bytes=stats.held,
        fallback_kept_bytes=stats.fallback_kept + parts.capture.slow_kept_bytes,
        checksum_seconds=sum(load.checksum_seconds for load in loads),
        drives_out_of_service=sum(not load.in_service for load in loads),
        weights_read_bytes=None if weights is None else weights.read_bytes,
        weights_waited_seconds=None if weights is None else weights.waited_seconds,
        left_alone_scopes=trace.left_alone,
        planning_seconds=parts.planning.seconds,
        predicted_peak_bytes=prediction.activation_peak if prediction is not None else None,
        predicted_seconds=prediction.seconds if prediction is not None else None,
        predicted_device_peak_bytes=(
            parts.budget.device_peak(prediction.peak_bytes) if prediction is not None else None
        ),
    )


def label_of(config: OffloadConfig, world: World, modules: Sequence[nn.Module], *, has_states: bool) -> str:
    """Return a label that tells what is offloaded: ``offload``, ``mixed``, ``keep + states + weights``.

    Args:
        config: What the user wanted.
        world: The layers of all ranks.
        modules: The model; its frozen weights travel if the policy says so.
        has_states: Whether states of optimizers are.
    """
    frozen = any(not each.requires_grad for module in modules for each in module.parameters())
    others = {"states": has_states, "weights": frozen and config.frozen_percent > 0}
    first = Plan.from_policy(config.policy, world.layers).strategy
    return " + ".join([first, *(name for name, is_offloaded in others.items() if is_offloaded)])


def header_of(
    config: OffloadConfig, strategy: str, model_info: Mapping[str, object] | None, parts: Parts
) -> RunHeader:
    """Return what a run log begins with.

    Args:
        config: What the user wanted.
        strategy: Label of the run.
        model_info: What the header says about the model.
        parts: What the session is made of.
    """
    world = parts.world
    return RunHeader(
        strategy=strategy,
        run=world.run,
        rank=world.rank,
        ranks=world.ranks,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        hardware={
            "device": _device_name(parts.device.torch_device),
            "cpus": os.cpu_count(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        model={"layers": len(world.layers), **(model_info or {})},
        policy=config.to_yaml(),
        plan=dict(_explained(config.policy, world.layers)),
        store=dict(parts.store.description),
    )


def _explained(policy: Policy, layers: Sequence[LayerId]) -> Iterator[tuple[str, object]]:
    """Yield the placement of every layer of the model, on whatever rank, and why."""
    for layer in layers:
        placement, why = policy.explain(layer)
        yield layer.name, {"layer": layer.number, "placement": placement.value, "why": why}


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return torch.get_device_module(device).get_device_name(device)  # type: ignore[no-any-return]
