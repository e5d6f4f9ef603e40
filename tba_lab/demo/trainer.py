"""One strategy of the demo: a megatron-core GPT that trains on real text, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from typing import TYPE_CHECKING, Any

import torch

import tba_offload as tba
from tba_lab.demo.race import measures_memory
from tba_lab.demo.text import batches
from tba_lab.gpt import Batch, GptShape, build_gpt, gpt_loss, model_flops
from tba_lab.megatron_cpu import single_process, training_device
from tba_offload.device import device_of
from tba_offload.device.malloc import keep_freed_pages
from tba_offload.device.memory import meter_of

if TYPE_CHECKING:
    from pathlib import Path


def _whole_seconds(figures: dict[str, Any], of_update: float | None) -> float | None:
    """Return what was predicted of a step and its updates together; ``None`` if not both were.

    Args:
        figures: Those of the step.
        of_update: Seconds of the last ``step()`` of an optimizer that does most in backward, which is in the
            prediction of that; ``None`` of another one, or before there was one.
    """
    updates = [each["predicted_seconds"] for each in figures["states"]] if of_update is None else [of_update]
    parts = [figures["predicted_seconds"], *updates]
    return None if None in parts or not figures["states"] else sum(parts)


_LR_WARM_UP = 10
"""Steps until the learning rate is reached."""


class Trainer:
    """Model, optimizer, data and session of one strategy.

    Args:
        shape: The model.
        text: Prefix of the indexed dataset.
        config: The policy as YAML text.
        strategy: Label of the run.
        batch_size: Sequences in a step.
        steps: Steps that are going to be asked for. The figures of the last hold a digest of the parameters.
        run_log: Where to write the run log.
        threads: Compute threads; ``None`` for PyTorch's own choice.
        device_bytes: The budget of the policy for weights, gradients, states and activations; what Python
            and its libraries have is added to it here, since a CPU counts that too.
        seed: Of weights, data order and dropout.
    """

    def __init__(
        self,
        *,
        shape: GptShape,
        text: Path,
        config: str,
        strategy: str,
        batch_size: int,
        steps: int,
        run_log: Path | None,
        threads: int | None = None,
        device_bytes: int | None = None,
        seed: int = 1234,
    ) -> None:
        keep_freed_pages()
        if threads is not None:
            torch.set_num_threads(threads)
        self._steps = steps
        self._device = training_device()
        self._meter = meter_of(device_of(self._device))
        self._flops = model_flops(shape, batch_size)
        self._tokens = shape.sequence * batch_size
        self._round = 0
        self._of_update: float | None = None
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(single_process(seed=seed))
        self.model = build_gpt(shape, seed=seed)
        self._batches = batches(
            text, sequence=shape.sequence, batch_size=batch_size, seed=seed, samples=steps * batch_size
        )
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-4, fused=True)
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, start_factor=1 / _LR_WARM_UP, total_iters=_LR_WARM_UP
        )
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        self._beside = self._meter.live() - weights  # what Python and its libraries have
        policy = tba.OffloadConfig.from_yaml(config)
        if device_bytes is not None:
            budget = dataclasses.replace(policy.budget, device_bytes=device_bytes + self._beside)
            policy = dataclasses.replace(policy, budget=budget)
        self.session = self._stack.enter_context(
            tba.attach(
                self.model,
                policy,
                optimizer=None if policy.states is None else self._optimizer,
                run_log=run_log,
                strategy=strategy,
                model_info={
                    "name": "megatron-core GPTModel",
                    "batch_size": batch_size,
                    **dataclasses.asdict(shape),
                },
            )
        )

    def step(self) -> dict[str, Any]:
        """Forward, backward and update; the figures of the step record, and the time of all three."""
        batch = next(self._batches)
        measure_memory, self._round = measures_memory(self._round), self._round + 1
        began = time.perf_counter()
        self._forward_and_backward(batch, measure_memory=measure_memory)
        if measure_memory:
            self._meter.reset()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # or the update would be in the next step's time
        seconds = time.perf_counter() - began
        figures = {**dataclasses.asdict(self.session.report()[-1]), "whole_step_seconds": seconds}
        if (until_update := figures["device_peak_bytes"]) is not None:
            figures["device_peak_bytes"] = max(until_update, self._meter.peak()) - self._beside
        if (predicted := figures["predicted_device_peak_bytes"]) is not None:
            figures["predicted_device_peak_bytes"] = predicted - self._beside
        figures["states"] = [dataclasses.asdict(states.records[-1]) for states in self.session.states]
        figures["predicted_whole_seconds"] = _whole_seconds(figures, self._of_update)
        if any(states["in_backward"] for states in figures["states"]):
            self._of_update = seconds - figures["seconds"]
        figures["parameters"] = self._digest() if self._round == self._steps else None
        return figures

    def _digest(self) -> str:
        """Return a digest of all bits of all parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _forward_and_backward(self, batch: Batch, *, measure_memory: bool) -> None:
        with self.session.step(
            tokens=self._tokens,
            model_flops=self._flops,
            measure_memory=measure_memory,
            trace=measure_memory,
        ) as step:
            loss = gpt_loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            step.loss = float(loss.detach())

    def close(self) -> None:
        """Close the session and the process group."""
        self._meter.close()
        self._stack.close()
