"""Plays a plan against a profile: when compute waits, how long the step takes, where memory peaks.

The simulator does what the offloader does, activation by activation, with the rates of a drive instead of a
drive; what layers do stands here, what becomes of bytes that travel in :mod:`tba_offload.plan.traffic`. Host
memory beside the drive takes writes while the drive has too much to do. Compute is a single thread of slots.
Nothing else is modelled: rates are constant, and both directions of both tiers have their own.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tba_offload.config.policy import Placement
from tba_offload.plan.model import Prediction
from tba_offload.plan.profile import Timing, computed_as
from tba_offload.plan.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from tba_offload.plan.bandwidth import Bandwidth
    from tba_offload.plan.model import Plan
    from tba_offload.plan.profile import LayerKind, Slot, StepProfile
    from tba_offload.plan.traffic import Item, Scope


def _go_on() -> None:
    """Record that the thread that plays has nothing else to do."""


pausing: ContextVar[Callable[[], None]] = ContextVar("pausing", default=_go_on)
"""Function that is called before each slot is played: a thread that shares the interpreter may rest there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What playing a plan showed.

    Attributes:
        seconds: Duration of the step.
        stall_seconds: How much of it compute waited for I/O.
        peak_bytes: Most bytes of the budget that it takes: of activations on the device, the rest of the
            profile included, less what lies where gradients come later, if the profile tells of those.
        written_bytes: Bytes that went to the drive.
        read_bytes: Bytes that came back.
        forwarded_bytes: Bytes of offloaded layers that were still there when backward came.
        write_seconds: How long the drive was busy with writes.
        read_seconds: How long it was busy with reads.
        host_written_bytes: Bytes that went to host memory beside the drive.
        host_read_bytes: Bytes that came back from there.
        host_peak_bytes: Most bytes that it held.
        held_bytes: As ``peak_bytes``, of what was not in flight, and with the rest left out.
        fallback_bytes: Bytes of offloaded layers that stayed because no tier had room for them.
        rebuild_seconds: Compute that layers placed ``offload-remat`` took longer than kept ones.
        peak_slot: What ran when there were most activations; ``None`` for a step without any.
        activation_bytes: Most bytes of activations on the device, the rest of the profile included.
    """

    seconds: float
    stall_seconds: float
    peak_bytes: int
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    write_seconds: float
    read_seconds: float
    host_written_bytes: int = 0
    host_read_bytes: int = 0
    host_peak_bytes: int = 0
    held_bytes: int = 0
    fallback_bytes: int = 0
    rebuild_seconds: float = 0.0
    peak_slot: Slot | None = None
    activation_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Most bytes that may go to the drives.

        Which activations backward finds in memory, and what host memory takes, depends on how fast drives are
        at that moment.
        """
        return self.written_bytes + self.forwarded_bytes + self.host_written_bytes

    @property
    def prediction(self) -> Prediction:
        """The figures that a step can be compared with."""
        known = self.seconds, self.stall_seconds, self.peak_bytes, self.written_bytes
        return Prediction(*known, activation_bytes=self.activation_bytes)


def simulate(profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> Outcome:
    """Play one step.

    Args:
        profile: The step.
        plan: A placement for each of its layers, and the window.
        bandwidth: The rates, and the host memory beside the drive.

    Raises:
        ValueError: The plan is for another number of layers.
    """
    if len(plan.placements) != len(profile.layers):
        raise ValueError(
            f"a plan for {len(plan.placements)} layers does not fit a profile of {len(profile.layers)}"
        )
    return _Run(profile, plan, bandwidth).play()


class _Event(NamedTuple):
    """Backward of a layer placed ``offload-remat`` comes to an activation.

    Attributes:
        at: When, as a share of the layer's backward time.
        nbytes: Its size.
        item: If it travelled.
        needs: Whether that is needed for the first time.
        uses: Whether this is its own use, and not that something else is rebuilt from it.
        rebuilds: Whether it is rebuilt.
    """

    at: float
    nbytes: int
    item: Item | None = None
    needs: bool = False
    uses: bool = True
    rebuilds: bool = False


class _Run:
    """Plays the slots of a step: what layers take, and what they leave in memory.

    Args:
        profile: The step.
        plan: A placement for each of its layers, and the window.
        bandwidth: The rates.
    """

    def __init__(self, profile: StepProfile, plan: Plan, bandwidth: Bandwidth) -> None:
        self._profile = profile
        self._plan = plan
        self._traffic = Traffic(profile, plan, bandwidth)
        self._rebuild_seconds = 0.0
        self._slot: Slot  # that is played
        # Of each layer, looked up once: there are many more slots than layers.
        self._kinds = [profile.kinds[kind] for kind in profile.layers]
        in_all = [kind.nbytes + kind.small_bytes for kind in profile.kinds]
        self._nbytes = [in_all[kind] for kind in profile.layers]
        ways = [placement.as_run for placement in plan.placements]
        self._staying = [plan.staying(layer, kind) for layer, kind in enumerate(self._kinds)]
        self._kept_bytes = [plan.kept_bytes(layer, kind) for layer, kind in enumerate(self._kinds)]
        self._timings = [self._timing_of(layer, way) for layer, way in enumerate(ways)]
        self._beside = [kind.beside_as(computed_as(ways[n])) for n, kind in enumerate(self._kinds)]
        self._rebuilding = [
            profile.rebuild_seconds(layer) if way.rebuilds else 0.0 for layer, way in enumerate(ways)
        ]

    def _timing_of(self, layer: int, way: Placement) -> Timing:
        """Return what a layer takes: so much less as offloading takes for what stays in memory."""
        timing = self._profile.timing(layer, way)
        if not way.is_offloaded:
            return timing
        staying = self._kept_bytes[layer]
        if not staying:
            return timing
        offloaded = self._profile.timing(layer, Placement.OFFLOAD)
        kept = self._profile.timing(layer, Placement.KEEP)
        share = staying / self._kinds[layer].nbytes
        return Timing(
            *(max(own - share * (a - b), b) for own, a, b in zip(timing, offloaded, kept, strict=True))
        )

    def play(self) -> Outcome:
        traffic, placements, pause = self._traffic, self._plan.placements, pausing.get()
        for place, slot in enumerate(self._profile.slots):
            pause()
            self._slot = slot
            traffic.begin(place, slot, self._beside[slot.layer][slot.backward])
            if slot.backward:
                traffic.read_ahead()
            self._play(placements[slot.layer])
        traffic.compute(self._profile.tail)
        return self._outcome()

    def _play(self, placement: Placement) -> None:
        """Play the slot of a layer that is placed so."""
        if placement.recomputes:
            self._recompute(placement)
        elif not placement.offloads:
            self._keep()
        elif not self._slot.backward:
            self._offload_forward(rebuilds=placement.rebuilds)
        elif placement.rebuilds:
            self._rebuild_backward()
        else:
            self._offload_backward()

    def _outcome(self) -> Outcome:
        traffic, drive, host = self._traffic, self._traffic.tiers.drive, self._traffic.tiers.host
        return Outcome(
            seconds=traffic.now,
            stall_seconds=traffic.stall,
            peak_bytes=traffic.memory.peak + self._profile.rest_bytes,
            written_bytes=drive.written,
            read_bytes=drive.read,
            forwarded_bytes=traffic.forwarded,
            write_seconds=drive.write_seconds,
            read_seconds=drive.read_seconds,
            host_written_bytes=host.written if host is not None else 0,
            host_read_bytes=host.read if host is not None else 0,
            host_peak_bytes=host.peak if host is not None else 0,
            held_bytes=traffic.memory.held,
            fallback_bytes=traffic.fallback,
            rebuild_seconds=self._rebuild_seconds,
            peak_slot=traffic.memory.peak_slot,
            activation_bytes=traffic.memory.activations + self._profile.rest_bytes,
        )

    # ---- the slot that is played -----------------------------------------------------------------

    @property
    def layer(self) -> int:
        return self._slot.layer

    @property
    def _scope(self) -> Scope:
        return self._slot.layer, self._slot.micro_batch

    @property
    def _kind(self) -> LayerKind:
        return self._kinds[self._slot.layer]

    @property
    def _seconds(self) -> float:
        return self._timings[self._slot.layer][self._slot.backward]

    # ---- layers that stay ------------------------------------------------------------------------

    def _keep(self) -> None:
        """Record that the layer keeps what it saves."""
        self._traffic.compute(self._seconds)
        nbytes = self._nbytes[self.layer]
        if self._slot.backward:
            self._traffic.memory.let_go(nbytes)
        else:
            self._traffic.hold(nbytes)

    def _recompute(self, placement: Placement) -> None:
        """Record that the layer keeps its inputs, unless they are offloaded, and runs again in backward."""
        if placement.offloads:
            self._recompute_from_store(spares_attention=placement.spares_attention)
            return
        kind = self._kind
        self._traffic.compute(self._seconds)
        if self._slot.backward:
            self._run_again(kind)
            self._traffic.memory.let_go(kind.input_bytes)
        else:
            self._traffic.hold(kind.input_bytes)

    def _run_again(self, kind: LayerKind, there: int = 0) -> None:
        """Record that what a second forward saves comes into memory, but for what is there, and goes."""
        nbytes = max(kind.recomputed_bytes - there, 0)
        self._traffic.hold(nbytes)
        self._traffic.memory.free(nbytes)

    # ---- layers that travel ----------------------------------------------------------------------

    def _recompute_from_store(self, *, spares_attention: bool) -> None:
        """Offload the inputs of such a layer, and the output of attention that is not computed again."""
        kind, scope, traffic = self._kind, self._scope, self._traffic
        attention = kind.attention_bytes or 0 if spares_attention else 0
        if self._slot.backward:
            used = 0
            for item in traffic.begin_backward(scope):
                traffic.use(item)
                used += item.goes
                traffic.read_ahead()
            traffic.end_backward(scope)
            traffic.compute(self._seconds)
            self._run_again(kind, attention)
            traffic.memory.free(used)
        else:
            items = [traffic.save(nbytes, 0.0) for nbytes in (kind.input_bytes, attention) if nbytes]
            traffic.compute(self._seconds)
            traffic.end_forward(scope, items)

    def _offload_forward(self, *, rebuilds: bool) -> None:
        traffic, kind, kept, seconds = self._traffic, self._kind, self._staying[self.layer], self._seconds
        items: list[Item] = []
        passed = 0.0
        traffic.hold(kind.small_bytes)
        for number, saved in enumerate(kind.activations):
            after, passed = (saved.at - passed) * seconds, saved.at
            if number in kept:
                traffic.compute(after)
                traffic.hold(saved.nbytes)
            elif rebuilds and saved.rebuilt:
                traffic.compute(after)
            else:
                until = saved.fetched if rebuilds else saved.until
                items.append(traffic.save(saved.nbytes, until, after))
        traffic.compute((1.0 - passed) * seconds)
        traffic.end_forward(self._scope, items)

    def _offload_backward(self) -> None:
        """Record that what travelled comes back when it is used."""
        traffic, seconds = self._traffic, self._seconds
        passed, used = 0.0, 0
        for item in traffic.begin_backward(self._scope):
            traffic.memory.free(used)  # the activation before was used up
            traffic.use(item, (item.until - passed) * seconds)
            passed = item.until
            used = item.goes
            traffic.read_ahead()
        traffic.compute((1.0 - passed) * seconds)
        self._end_backward(used)

    def _rebuild_backward(self) -> None:
        """Record that what is rebuilt comes into being when it is used.

        What it is made of stays until its own use.
        """
        traffic, seconds = self._traffic, self._seconds
        passed, used = 0.0, 0
        self._rebuild_seconds += self._rebuilding[self.layer]
        for event in self._remat_events():
            traffic.compute((event.at - passed) * seconds)
            passed = event.at
            if event.uses:
                traffic.memory.free(used)
            if event.item is not None and event.needs:
                traffic.use(event.item)
                traffic.read_ahead()
            elif event.rebuilds:
                traffic.hold(event.nbytes)
            if event.uses:
                used = event.nbytes if event.item is None else event.item.goes
        traffic.compute((1.0 - passed) * seconds)
        self._end_backward(used)

    def _remat_events(self) -> list[_Event]:
        """Backward of a layer of which some activations are rebuilt, in its order."""
        every = self._kind.activations
        events = [_Event(saved.until, saved.nbytes, rebuilds=True) for saved in every if saved.rebuilt]
        travelled = sorted((saved for saved in every if not saved.rebuilt), key=lambda saved: saved.fetched)
        items = self._traffic.begin_backward(self._scope)
        for saved, item in zip(travelled, items, strict=True):
            is_last = saved.fetched == saved.until
            events.append(_Event(saved.fetched, saved.nbytes, item, needs=True, uses=is_last))
            if not is_last:
                events.append(_Event(saved.until, saved.nbytes, item))
        return sorted(events, key=lambda event: event.at)

    def _end_backward(self, used: int) -> None:
        """Record that the layer has gone backward: nothing of it is left, neither what was used last."""
        self._traffic.end_backward(self._scope)
        self._traffic.memory.free(used)
        self._traffic.memory.let_go(self._kept_bytes[self.layer] + self._kind.small_bytes)
