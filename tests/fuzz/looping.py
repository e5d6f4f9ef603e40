"""The loop of a program: the same code trains plainly and with offloading, and notes all that it computes."""

from __future__ import annotations

import copy
import random
import traceback
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from harness import in_time
from torch import Tensor, nn
from torch.optim import swa_utils

import tba_offload as tba

from . import network, policies, updates
from .network import Mishap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .choices import Program

AT = 1
"""The step in which what happens once happens."""


class Bits(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def __str__(self) -> str:
        found = torch.frombuffer(bytearray(self.data), dtype=torch.uint8) if self.data else torch.tensor([])
        values = found.view(self.dtype).reshape(self.shape) if self.data else found
        return f"{tuple(self.shape)} {values.flatten()[:4].tolist()}"


@dataclass(frozen=True)
class Failure:
    where: str
    kind: type[BaseException]
    message: str
    trace: str

    def __str__(self) -> str:
        return f"{self.kind.__name__} in {self.where}: {self.message}"


class History:
    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []
        self.failed: Failure | None = None
        self.failed_closing: Failure | None = None

    def note(self, what: str, value: Any) -> None:
        self.notes.append((what, bits_of(value) if isinstance(value, Tensor) else value))

    def note_tree(self, what: str, tree: Any) -> None:
        for path, leaf in leaves(tree):
            self.note(f"{what} {path}", leaf)

    def fail(self, where: str, kind: type[BaseException], message: str, trace: str) -> None:
        failure = Failure(where, kind, message, trace)
        if self.failed is None:
            self.failed = failure
        else:
            self.failed_closing = failure

    def first_difference(self, other: History) -> str | None:
        for (what, value), (other_what, other_value) in zip(self.notes, other.notes, strict=False):
            if what != other_what:
                return f"{what} in place of {other_what}"
            if value != other_value:
                return f"{what}: {value} in place of {other_value}"
        return None


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from ((f"{key}.{path}", leaf) for path, leaf in leaves(value))
    elif isinstance(tree, list | tuple):
        yield from leaves(dict(enumerate(tree)))
    else:
        yield "", tree


def bits_of(tensor: Tensor) -> Any:
    found = tensor.detach()
    if found.is_sparse:
        found = found.coalesce()
        return bits_of(found.indices()), bits_of(found.values())
    found = found.contiguous().reshape(-1)
    data = found.view(torch.uint8).numpy().tobytes() if found.numel() else b""
    return Bits(tensor.dtype, tuple(tensor.shape), data)


class Training:
    """One training, plain where there is no directory for offloaded bytes."""

    def __init__(self, program: Program, directory: Path | None) -> None:
        random.seed(program.seed)
        torch.manual_seed(program.seed)
        self.program = program
        self.directory = directory
        self.history = History()
        self.model = network.make(program)
        self.late = [self.model.head.bias] if program.group_comes_late else []
        self.optimizers = updates.make_all(self.model, self.late, program)
        self.schedulers = [each for optimizer in self.optimizers for each in self.scheduler(optimizer)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.average = swa_utils.AveragedModel(self.model) if program.ema == "averaged" else None
        self.first_state = copy.deepcopy(self.model.state_dict())
        self.attached: list[Any] = []
        self.micro_batch = 0
        if program.gradient_hook:
            self.model.layers[0].register_full_backward_hook(lambda *_: None)
            self.model.head.weight.register_hook(lambda gradient: gradient * 0.5)
        if program.accumulate_hook:
            self.model.head.weight.register_post_accumulate_grad_hook(halve)

    def run(self) -> History:
        steps = self.program.steps
        with policies.drive_of(self.program) if self.directory is not None else nullcontext():
            self.guarded("attach", self.attach)
            for number in range(steps):
                self.guarded(f"step {number}", self.step, number)
            if not self.history.failed and self.program.states is not None:
                self.guarded("states", self.note_states)
            self.guarded("close", self.close, always=True)
        self.guarded("step after the end", self.step, steps)
        self.guarded("end", self.note_end)
        self.model.zero_grad()  # after an error there are as many as backward has come to
        return self.history

    def guarded(self, where: str, work: Any, *args: Any, always: bool = False) -> None:
        if self.history.failed and not always:
            return
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - it is compared
            self.history.fail(where, type(error), str(error), traceback.format_exc())
            traceback.clear_frames(error.__traceback__)

    # ---- offloading ------------------------------------------------------------------------------

    def attach(self) -> None:
        program = self.program
        if self.directory is None:
            return
        policy = policies.policy_of(program, self.directory)
        optimizers = self.optimizers if program.states is not None else None
        if program.attached == "optimizer alone":
            for optimizer in self.optimizers:
                self.attached.append(tba.offload_optimizer(optimizer, policy, model=self.model))
            return
        self.attached.append(
            tba.attach(
                self.model,
                policy,
                layers=None if program.found else list(self.model.layers),
                optimizer=optimizers,
                measure_memory=program.measures_memory,
                run_log=self.directory / f"{random.Random().random()}.jsonl" if program.run_log else None,
            )
        )

    def close(self) -> None:
        with ExitStack() as stack:
            for each in self.attached:
                stack.callback(each.close)
            self.attached = []

    def block(self) -> AbstractContextManager[Any]:
        by_hand = self.program.opened != "by itself" and self.attached and self.program.attached == "session"
        block: AbstractContextManager[Any] = self.attached[0].step() if by_hand else nullcontext()
        return block

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        program = self.program
        if number == AT:
            self.what_happens_once()
        if program.noise_in_weights:
            for each in self.trained():
                each.data.add_(torch.randn(each.shape).to(each), alpha=1e-3)
        try:
            if program.closure:
                self.with_closure(number)
            else:
                self.passes_and_update(number)
        except Mishap:
            self.history.note(f"step {number}", "mishap")
            self.model.zero_grad()
        self.model.layers[-1].fails = False
        self.evaluate(number)
        self.note_parameters(number)

    def passes_and_update(self, number: int) -> None:
        with self.block():
            self.passes(number)
            if self.program.opened == "block with update":
                self.update(number)
        if self.program.opened != "block with update":
            self.update(number)
        self.clear()

    def with_closure(self, number: int) -> None:
        def closure() -> Tensor:
            self.model.zero_grad()
            return self.passes(number)

        first, *others = self.optimizers
        first.step(closure)
        for other in others:
            other.step()

    def what_happens_once(self) -> None:
        program = self.program
        if program.reattach != "no" and self.attached:  # else training is over already
            self.close()
            self.attach()
        if program.freezes:
            self.model.layers[0].requires_grad_(False)
        if self.late:
            self.optimizers[-1].add_param_group({"params": self.late})
        if program.model_round_trip == "same":
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        elif program.model_round_trip == "to the first":
            self.model.load_state_dict(self.first_state)
        if program.optimizer_round_trip:
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def passes(self, number: int) -> Tensor:
        program = self.program
        count = program.micro_batches[number % len(program.micro_batches)]
        losses: list[Tensor] = []
        total = torch.zeros(())
        for micro in range(count):
            fails = number == AT and micro == count - 1
            loss = self.forward(number, fails=program.mishap if fails else "none")
            self.history.note(f"step {number} loss {micro}", loss)
            total = total + loss.detach()
            losses.append(loss / count)
            if program.order == "one by one":
                self.backward(losses.pop(), number)
            if program.evaluation == "between micro-batches":
                self.look(number)
        if program.order == "sum of losses":
            losses = [torch.stack(losses).sum()]
        while losses:
            self.backward(losses.pop(0), number)
        if number == AT and program.mishap == "update":
            raise Mishap
        return total

    def forward(self, number: int, *, fails: str) -> Tensor:
        program = self.program
        given, targets = network.batch(program, self.micro_batch)
        self.micro_batch += 1
        weights = sum((each.square().sum() for each in self.trained()), torch.zeros(()))
        self.model.layers[-1].fails = fails == "forward"
        if program.penalty == "input" and given.is_floating_point():
            given.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            out = self.model(given)
            loss = network.loss_of(out, targets)
        if fails == "between":
            raise Mishap
        if fails == "backward":
            out.register_hook(raise_mishap)
        return self.with_penalty(loss, given, weights)

    def with_penalty(self, loss: Tensor, given: Tensor, weights: Tensor) -> Tensor:
        penalty = self.program.penalty
        if penalty == "weights":
            return loss + 1e-3 * weights
        asked = [given] if given.requires_grad else self.trained()
        if penalty == "none":
            return loss
        found = torch.autograd.grad(loss, asked, create_graph=True, allow_unused=True)
        return loss + sum(each.square().sum() for each in found if each is not None)

    def backward(self, loss: Tensor, number: int) -> None:
        program = self.program
        if program.scaler != "none":
            loss = self.scaler.scale(loss) * (torch.inf if self.overflows(number) else 1)
        parameters = [each for each in self.trained() if each.requires_grad]
        if program.backward == "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif program.backward == "two losses":
            (loss * 0.5).backward(retain_graph=True)
            (loss * loss).backward()
        elif program.backward == "in a thread":
            in_time(loss.backward)  # on a thread of its own
        elif program.backward == "to inputs":
            loss.backward(inputs=parameters)
        elif program.backward == "autograd.grad":
            for each, found in zip(
                parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if found is not None:
                    each.grad = found if each.grad is None else each.grad + found
        else:
            loss.backward()

    def overflows(self, number: int) -> bool:
        return self.program.scaler == "overflows" and number == AT

    def update(self, number: int) -> None:
        program = self.program
        if not program.frees_gradients:
            self.note_gradients(number)
        if program.skipped and number == AT:
            return
        scaled = program.scaler != "none"
        if scaled and program.clip != "none":
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self.clip()
        for optimizer in self.optimizers:
            if scaled:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if scaled:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def clip(self) -> None:
        kind = self.program.clip
        parameters = list(self.trained())
        if kind == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif kind != "none":
            found = nn.utils.clip_grad_norm_(parameters, 0.1 if kind == "norm" else 1e9)
            self.history.note("norm", found)

    def clear(self) -> None:
        zero = self.program.zero
        if zero == "by model":
            self.model.zero_grad()
        elif zero != "never":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=zero == "to none")
        for each in self.late:
            each.grad = None

    def evaluate(self, number: int) -> None:
        program = self.program
        if program.evaluation in {"no_grad", "inference", "forgotten"}:
            self.model.eval()
            self.look(number)
            self.model.train()
        if program.ema == "deep copy" and number == AT:
            other = copy.deepcopy(self.model)
            with torch.no_grad():
                self.history.note(f"step {number} copy", other(network.batch(program, 99)[0]))

    def look(self, number: int) -> None:
        modes = {"inference": torch.inference_mode, "forgotten": torch.enable_grad}
        with modes.get(self.program.evaluation, torch.no_grad)():
            given, _ = network.batch(self.program, 99)
            self.history.note(f"step {number} evaluation", self.model(given))

    # ---- what is noted ---------------------------------------------------------------------------

    def trained(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def note_gradients(self, number: int) -> None:
        for name, each in self.model.named_parameters():
            self.history.note(f"step {number} gradient of {name}", each.grad)

    def note_parameters(self, number: int) -> None:
        for name, each in self.model.named_parameters():
            if each.requires_grad:  # others may be away
                self.history.note(f"step {number} {name}", each)
        for name, each in self.model.named_buffers():
            self.history.note(f"step {number} {name}", each)
        self.history.note(f"step {number} generator of PyTorch", torch.get_rng_state())
        self.history.note(f"step {number} generator of Python", hash(random.getstate()))

    def note_states(self) -> None:
        for number, optimizer in enumerate(self.optimizers):
            self.history.note_tree(f"optimizer {number}", optimizer.state_dict())

    def note_end(self) -> None:
        self.history.note_tree("model at the end", self.model.state_dict())
        self.note_states()
        self.history.note_tree("scaler", self.scaler.state_dict())
        for scheduler in self.schedulers:
            self.history.note("rates", str(scheduler.get_last_lr()))
        if self.average is not None:
            self.history.note_tree("average", self.average.state_dict())

    def scheduler(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        kinds = torch.optim.lr_scheduler
        kind = self.program.scheduler
        if kind == "step":
            return [kinds.StepLR(optimizer, 1, 0.5)]
        if kind == "one cycle":
            return [kinds.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False)]
        return []


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def raise_mishap(_: Tensor) -> None:
    raise Mishap
