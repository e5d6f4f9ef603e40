"""Megatron-LM's Adam on a GPU, on a CPU: Apex's class, as far as training and checkpoints see it.

It counts steps once in a parameter group, where PyTorch's own counts them for each parameter: a distributed
optimizer of Megatron-LM saves the states of PyTorch's Adam in a form that it cannot load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adam import adam

from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_STATES = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW.

    Args:
        params: Parameters or parameter groups.
        lr: The learning rate.
        betas: Decay rates of the two averages.
        eps: Added to the denominator.
        adam_w_mode: Whether weights decay by themselves and not through their gradients.
        weight_decay: By how much.
        capturable: Whether CUDA graphs may hold the update; there are none.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise UnsupportedError("there are no CUDA graphs on a CPU")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self._update(group, [each for each in group["params"] if each.grad is not None])
        return loss

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            for name in _STATES:
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter)
        averages, squares = ([self.state[each][name] for each in parameters] for name in _STATES)
        steps = [torch.tensor(group["step"] - 1.0) for _ in parameters]  # counted up by what is called
        adam(
            parameters,
            [each.grad for each in parameters],  # type: ignore[misc] # those without one were left out
            averages,
            squares,
            [],
            steps,
            foreach=False,
            decoupled_weight_decay=self.adam_w_mode,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


FusedAdam.__module__ = "apex.optimizers.fused_adam"
