"""What a session is made of."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tba_offload.adapt.planning import Planning
from tba_offload.capture.gradients import Gradients
from tba_offload.capture.hooks import Capture
from tba_offload.capture.rematerialize import Rebuilds
from tba_offload.capture.site import Site
from tba_offload.device.streams import device_of_model, devices_of
from tba_offload.errors import UnsupportedError
from tba_offload.plan.model import Plan
from tba_offload.recompute.verdicts import Verifier
from tba_offload.session.budget import Budget, Watched, limits_of
from tba_offload.session.memory_watch import MemoryWatch
from tba_offload.session.meters import Meters
from tba_offload.session.notices import Notices, tell
from tba_offload.session.outputs import Outputs
from tba_offload.session.ranges import Ranges
from tba_offload.session.static_memory import static_bytes
from tba_offload.session.step_curve import StepCurve
from tba_offload.store import open_store
from tba_offload.transfer.offloader import Offloader
from tba_offload.weights import WeightsTraffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from tba_offload.config import OffloadConfig
    from tba_offload.device.streams import Device
    from tba_offload.layers.stack import Layer, LayerStack, LeftOut
    from tba_offload.plan.model import Limits
    from tba_offload.session.ongoing import Ongoing
    from tba_offload.session.world import World
    from tba_offload.states import OptimizerStates
    from tba_offload.store.base import ActivationStore


@dataclass(frozen=True)
class Parts:
    """What a session is made of.

    Attributes:
        modules: The model or its chunks.
        sites: Where the session stands in front of layers.
        left_out: Blocks that are none of the layers.
        optimizers: Those that were seen to update parameters of the model.
        states: Those that are offloaded.
        weights: What frozen weights move, if they are offloaded.
        budget: What activations may take.
    """

    modules: Sequence[nn.Module]
    sites: Sequence[Site]
    left_out: Sequence[LeftOut]
    device: Device
    store: ActivationStore
    offloader: Offloader
    capture: Capture
    gradients: Gradients
    verifier: Verifier
    rebuilds: Rebuilds
    planning: Planning
    meters: Meters
    outputs: Outputs
    memory_watch: MemoryWatch
    curve: StepCurve
    ranges: Ranges
    optimizers: weakref.WeakSet[Optimizer]
    states: list[OptimizerStates]
    weights: WeightsTraffic
    notices: Notices
    world: World
    budget: Budget


def make_parts(
    stack: LayerStack,
    modules: Sequence[nn.Module],
    config: OffloadConfig,
    *,
    world: World,
    ongoing: Ongoing,
    measure_memory: bool,
) -> Parts:
    """Open the store, and make the other parts.

    Args:
        stack: The layers.
        modules: The model or its chunks.
        config: What the user wanted.
        world: The other ranks.
        ongoing: Where it is noted which step is open.
        measure_memory: Whether to measure the memory of steps that do not say so themselves.

    Raises:
        ConfigError: A rule of the policy takes no effect.
        StoreError: The store cannot be opened.
    """
    notices, limits = Notices(), limits_of(config)
    plan = plan_of(config, stack.layers, world, limits)
    device = device_of_model(modules)
    gradients = Gradients(modules, device.torch_device, ongoing.look_at_memory)
    store = open_store(config.store, device=device)
    try:
        meters = Meters(device, ongoing, gradients.live, notices, wanted=measure_memory)
        if config.budget.device_bytes is not None:
            _check_measured(meters)
    except BaseException:
        store.close()
        raise
    offloader = Offloader(
        store,
        device,
        window=limits.window,
        keep_when_full=config.on_full == "keep",
        stall_limit=config.store.stall_seconds,
        budget_bytes=config.budget.activation_bytes,
    )
    capture = Capture(
        offloader,
        min_tensor_bytes=config.min_tensor_bytes,
        budget_bytes=limits.budget,
    )
    planning = Planning(plan, [layer.id.number for layer in stack.layers], capture, offloader)
    optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    states: list[OptimizerStates] = []
    weights = WeightsTraffic()
    outputs = Outputs(capture, device.torch_device, len(stack.layers) - 1)
    memory_watch = MemoryWatch(
        gradients.live, outputs, capture, modules, [layer.id.name for layer in stack.layers]
    )
    curve = StepCurve(offloader, store, memory_watch, states, weights)
    meters.tell(memory_watch, curve)
    return Parts(
        modules=tuple(modules),
        sites=[Site(layer, index) for index, layer in enumerate(stack.layers)],
        left_out=stack.left_out,
        device=device,
        store=store,
        offloader=offloader,
        capture=capture,
        gradients=gradients,
        verifier=Verifier(
            stack.layers, stack.generators(devices_of(modules, device)), stack.not_compared, tell
        ),
        rebuilds=Rebuilds(capture, stack.functions),
        planning=planning,
        meters=meters,
        outputs=outputs,
        memory_watch=memory_watch,
        curve=curve,
        ranges=Ranges(),
        optimizers=optimizers,
        states=states,
        weights=weights,
        notices=notices,
        world=world,
        budget=Budget(
            limits,
            Watched(planning, capture, gradients.live, notices),
            device_bytes=config.budget.device_bytes,
            static=lambda: static_bytes(modules, optimizers, states, device.torch_device),
        ),
    )


def plan_of(config: OffloadConfig, layers: Sequence[Layer], world: World, limits: Limits) -> Plan:
    """Return the plan of a policy."""
    ids = [layer.id for layer in layers]
    return Plan.from_policy(config.policy, ids, world.layers, window=limits.window)


def _check_measured(meters: Meters) -> None:
    """Check that it can be told what lies on the device.

    Raises:
        UnsupportedError: It cannot.
    """
    try:
        meters.of_step(wanted=True, may_help=True)
    except UnsupportedError as error:
        raise UnsupportedError(
            "budget.device_bytes needs to know what lies on the device, and that is not measured here "
            f"({error}); set budget.activation_bytes instead"
        ) from error
