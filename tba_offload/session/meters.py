"""What measures the memory of steps, where that is wanted and possible."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tba_offload.device.memory import MemoryMeter, ResidentPeak, meter_of
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from tba_offload.device.live_bytes import LiveBytes
    from tba_offload.device.streams import Device
    from tba_offload.session.memory_watch import MemoryWatch
    from tba_offload.session.notices import Notices
    from tba_offload.session.ongoing import Ongoing
    from tba_offload.session.step_curve import StepCurve


class Meters:
    """Measures the memory of steps; there is a meter as soon as one is wanted.

    Args:
        device: Whose memory.
        ongoing: The step that is open, if one is.
        gradients: Their bytes, which are no activations.
        notices: Takes the warning that memory cannot be measured.
        wanted: Whether steps are measured that do not say so themselves.

    Attributes:
        resident: The operating system's peak of the process.
    """

    def __init__(
        self, device: Device, ongoing: Ongoing, gradients: LiveBytes, notices: Notices, *, wanted: bool
    ) -> None:
        self.resident = ResidentPeak()
        self._device = device
        self._ongoing = ongoing
        self._gradients = gradients
        self._notices = notices
        self._wanted = wanted
        self._told: list[weakref.ref[MemoryWatch] | weakref.ref[StepCurve]] = []
        self._meter = self._meter_if_possible() if wanted else None

    def tell(self, watch: MemoryWatch, curve: StepCurve) -> None:
        """Have a watch and a curve told of what a meter sees."""
        self._told += [weakref.ref(watch), weakref.ref(curve)]

    def of_step(self, *, wanted: bool | None, may_help: bool) -> MemoryMeter | None:
        """Return the meter of a step that begins.

        Args:
            wanted: Whether the step is to be measured; ``None`` for what holds for all.
            may_help: Whether the planner has a use for its figures anyway.

        Raises:
            UnsupportedError: It is wanted of this step, and the memory of this device cannot be measured.
        """
        if wanted and self._meter is None:
            self._meter = self._new_meter()
        wanted = self._wanted if wanted is None else wanted
        if not wanted and may_help:
            wanted = True
            self._meter = self._meter or self._meter_if_possible()
        return self._meter if wanted else None

    def leave(self, meter: MemoryMeter | None) -> None:
        """Record that a step begins with this meter, or none.

        An interrupted one may have left another watching.
        """
        if self._meter is not None and meter is None:
            self._meter.peak()

    def close(self) -> None:
        """End the thread that samples, if there is one."""
        if self._meter is not None:
            self._meter.close()

    def _new_meter(self) -> MemoryMeter:
        # A thread must not keep a model alive.
        own, gradients, told = weakref.ref(self._ongoing), self._gradients, self._told

        def static() -> int:
            """Live bytes that are no activations and may have come into being in this step."""
            ongoing = own()
            return gradients.nbytes + ongoing.state_bytes if ongoing is not None else 0

        def saw(live: int, aside: int) -> None:
            for found in told:
                if (each := found()) is not None:
                    each.seen(live, aside)

        meter = meter_of(self._device, static)
        meter.tell(saw)
        return meter

    def _meter_if_possible(self) -> MemoryMeter | None:
        """Training goes on where memory cannot be measured; the run log has no figure then."""
        try:
            return self._new_meter()
        except UnsupportedError as error:
            self._notices.warn_once("meter", f"the activation peak is not measured: {error}")
            return None
