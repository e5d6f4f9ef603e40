"""Outcomes of comparisons of second runs, asked before each step of an optimizer."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from tba_offload.errors import RecomputationError

if TYPE_CHECKING:
    import torch


class Verifier:
    """Outcomes of the comparisons of one session.

    A comparison is computed on the device. Its outcome is read before the next step of any optimizer, and at
    once on a CPU, where nothing has to be waited for.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[str, torch.Tensor]] = deque()
        own = weakref.ref(self)  # the hook is global, and must not keep a session alive

        def check(*_: object) -> None:
            verifier = own()
            if verifier is not None:
                verifier.check()

        self._handle = register_optimizer_step_pre_hook(check)
        weakref.finalize(self, self._handle.remove)

    def add(self, name: str, differs: torch.Tensor) -> None:
        """Note an outcome.

        Args:
            name: What errors call what was computed again.
            differs: A boolean of one element: whether the second run gave other bytes.

        Raises:
            RecomputationError: It did, as is known at once on a CPU.
        """
        self._open.append((name, differs))
        if differs.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Check all outcomes since the last time; waits for the device if there are some.

        Raises:
            RecomputationError: A second run gave other numbers than the first.
        """
        found = [self._open.popleft() for _ in range(len(self._open))]
        wrong = list(dict.fromkeys(name for name, differs in found if differs.item()))
        if wrong:
            raise RecomputationError(
                f"{', '.join(wrong)} cannot be recomputed: its second run gave other numbers than the first. "
                "It depends on something that changed in between, such as a generator of its own, a counter "
                "or a global. Do not use the gradients of this step. Place it keep or offload."
            )

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()
