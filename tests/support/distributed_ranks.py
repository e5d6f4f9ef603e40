"""Two ranks that train small models spread by PyTorch's own means, with a session and without: a program.

    python distributed_ranks.py DIRECTORY CASE...

Each rank trains under the cases and leaves what came out in ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import os
import sys
import warnings
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import KIB, PATIENCE, Drive, assert_all_given_back, quiesce, session_for
from models import same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tba_offload as tba
from tba_offload.errors import SessionError, StatesAwayError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from warm import Warm

    from tba_offload.session import Session

RANKS, LAYERS = 2, 4
STEPS, STEPS_OF_A_PLAN = 3, 4
"""The fourth is the first under a plan."""
MICRO_BATCHES = 3
IN_STAGES = "in stages"
ROWS, LENGTH, WIDTH, INNER = 4, 32, 64, 256
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.gelu(self.up(y)) * self.gate(y))


class Net(nn.Module):
    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


# ---- ways to spread a model ----------------------------------------------------------------------


def by_batch(net: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def by_shards(net: Net, **settings: Any) -> nn.Module:
    wrap = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(net, auto_wrap_policy=wrap, device_id=CPU, **settings)


def by_parameters(net: Net, **settings: Any) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer, **settings)
    return fully_shard(net, **settings)


def by_layers(net: Net) -> nn.Module:
    for layer in (net.first, *net.layers, net.last):
        fully_shard(layer)
    return net


def by_columns(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    column = ColwiseParallel(use_local_output=False)
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": column, "gate": column, "down": RowwiseParallel()})
    return net


def by_sequence(net: Net) -> nn.Module:
    """The activations between the products are sharded as well, and distributed tensors throughout."""
    mesh = init_device_mesh("cpu", (RANKS,))
    column = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    for layer in net.layers:
        parallelize_module(
            layer, mesh, {"norm": SequenceParallel(), "up": column, "gate": column, "down": row}
        )
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(net, mesh, {"first": first, "last": last})


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

SPREAD: dict[str, Callable[[Net], nn.Module]] = {
    "by batch": by_batch,
    "by shards": by_shards,
    "by shards, with the parameters": partial(by_shards, use_orig_params=True),
    "by parameters": by_parameters,
    "by parameters, gathered once": partial(by_parameters, reshard_after_forward=False),
    "by parameters, in bf16": partial(by_parameters, mp_policy=BF16),
    "by columns": by_columns,
    "by sequence": by_sequence,
}


class Stage(nn.Module):
    def __init__(self, net: Net, rank: int) -> None:
        super().__init__()
        own = LAYERS // RANKS
        self.layers = net.layers[rank * own : (rank + 1) * own]
        self.ends = net.first if rank == 0 else net.last
        self.is_first = rank == 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x) if self.is_first else x
        for layer in self.layers:
            x = layer(x)
        return x if self.is_first else self.ends(x)


# ---- what a rank does ----------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def attached(model: nn.Module, default: str | None) -> Session | None:
    """A session; the planner's has a drive so slow, and a budget so small, that it would rather recompute."""
    if default is None:
        return None
    if default != "auto":
        return session_for(model, in_flight=64 * KIB, default=default)
    drive = Drive()
    drive.writes.bytes_per_second = drive.reads.bytes_per_second = 5e6
    return session_for(
        model, drive=drive, in_flight=64 * KIB, activation=512 * KIB, default=default, measure_memory=True
    )


def trained(
    spread: str, rank: int, default: str | None, steps: int
) -> tuple[list[Tensor], list[dict[str, int]]]:
    torch.manual_seed(0)
    model = Stage(Net(), rank) if spread == IN_STAGES else SPREAD[spread](Net())
    run = pipelined(model, rank) if spread == IN_STAGES else partial(forward_backward, model, spread, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attached(model, default)
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)  # from which dropout draws
        with session.step() if session is not None else nullcontext():
            found += run(step, session)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(parameter.detach()) for parameter in model.parameters())], moved(session)


def forward_backward(
    model: nn.Module, spread: str, rank: int, step: int, session: Session | None
) -> list[Tensor]:
    is_shared = spread in {"by columns", "by sequence"}
    generator = torch.Generator().manual_seed(step if is_shared else RANKS * step + rank)
    loss = model(torch.randn(ROWS, LENGTH, WIDTH, generator=generator)).float().pow(2).mean()
    if session is not None:
        quiesce(session.offloader)  # or what is forwarded while it is written counts twice
    loss.backward()
    return [local(loss.detach())]


def pipelined(stage: nn.Module, rank: int) -> Callable[[int, Session | None], list[Tensor]]:
    example = torch.zeros(ROWS, LENGTH, WIDTH)
    pipeline = PipelineStage(stage, rank, RANKS, CPU, input_args=(example,))
    schedule = Schedule1F1B(pipeline, MICRO_BATCHES, loss_fn=lambda out, _: out.pow(2).mean())

    def run(step: int, _: Session | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(MICRO_BATCHES * ROWS, LENGTH, WIDTH, generator=generator)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        return [loss.detach() for loss in losses]

    return run


def moved(session: Session | None) -> list[dict[str, int]]:
    if session is None:
        return []
    with session:
        assert_all_given_back(session)
    figures = (
        *("offloaded_bytes", "forwarded_bytes", "kept_bytes", "rebuilt_bytes"),
        *("left_alone_scopes", "recomputed_scopes"),
    )
    return [{figure: getattr(record, figure) for figure in figures} for record in session.records]


@cache
def plainly_trained(spread: str, rank: int, steps: int) -> list[Tensor]:
    """Once for all placements; the ranks do the same cases in the same order, so they meet here too."""
    return trained(spread, rank, None, steps)[0]


def compare(spread: str, rank: int, default: str) -> dict[str, Any]:
    count = STEPS_OF_A_PLAN if default == "auto" else STEPS
    expected = plainly_trained(spread, rank, count)
    found, steps = trained(spread, rank, default, count)
    pairs = zip(found, expected, strict=True)
    return {"different": sum(not same_bits(a, b) for a, b in pairs), "steps": steps}


EVERYWHERE = (*SPREAD, IN_STAGES)
COMPARED = {
    "offload": EVERYWHERE,
    "offload-remat": EVERYWHERE,
    "recompute": EVERYWHERE,
    "recompute-offload": EVERYWHERE,
    "recompute-except-attention": EVERYWHERE,
    "auto": ("by batch", "by shards", "by parameters", "by columns", IN_STAGES),
}
"""Which placements are compared with plain training of models that are spread how."""


# ---- optimizer states ----------------------------------------------------------------------------


class Updates:
    """One training whose optimizer has states. Of the model's last weight, of one row, a rank has none."""

    def __init__(self, spread: Callable[[Net], nn.Module]) -> None:
        torch.manual_seed(5)
        self.model = spread(Net(outputs=1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int, *, most: float | None = 0.1, batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for batch in range(batches):
            generator = torch.Generator().manual_seed(100 * number + 10 * batch + dist.get_rank())
            self.model(torch.randn(ROWS, LENGTH, WIDTH, generator=generator)).square().mean().backward()
        if most is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        entries = self.optimizer.state_dict()["state"]
        states = [value for entry in entries.values() for value in entry.values()]
        return [local(each.detach()).reshape(-1) for each in [*self.model.parameters(), *states]]


def policy_of_states(**states: Any) -> dict[str, dict[str, Any]]:
    return {"states": {"sub_group_bytes": "128KiB", **states}, "store": {"kind": "host"}}


def differing(one: Updates, other: Updates) -> int:
    return sum(not same_bits(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def compare_states(_: int, spread: str) -> dict[str, Any]:
    """How many tensors differ after training, and after a checkpoint went from one training to another."""
    plain, found, resumed = (Updates(SPREAD[spread]) for _ in range(3))
    with (
        tba.offload_optimizer(found.optimizer, policy_of_states()) as states,
        tba.offload_optimizer(resumed.optimizer, policy_of_states()),
    ):
        for number in range(3):
            plain.step(number)
            found.step(number)
        record = states.records[-1]
        result = {"trained": differing(found, plain), "away": record.states_bytes, "read": record.read_bytes}
        if "shards" not in spread:  # FSDP1's own way is a function of its class
            resumed.model.load_state_dict(plain.model.state_dict())
            saved = copy.deepcopy(get_optimizer_state_dict(found.model, found.optimizer))
            set_optimizer_state_dict(resumed.model, resumed.optimizer, saved)
            for run in (plain, found, resumed):
                run.step(9)
            result["resumed"] = differing(resumed, plain) + differing(found, plain)
    result["closed"] = differing(found, plain)
    return result


def compare_updates_in_backward(_: int, spread: Callable[[Net], nn.Module]) -> dict[str, Any]:
    """How many tensors differ where updates are made in backward, and which steps were."""
    plain, found = Updates(spread), Updates(spread)
    policy = policy_of_states(when="backward", micro_batches=2)
    result: dict[str, Any] = {"differing": [], "in_backward": []}
    with tba.offload_optimizer(found.optimizer, policy, model=found.model) as states:
        for number, batches in enumerate((2, 2, 1, 2)):
            for run in (plain, found):
                run.step(number, most=None, batches=batches)
            result["differing"].append(differing(found, plain))
            result["in_backward"].append(states.records[-1].in_backward > 0)
        found.optimizer.zero_grad()
        try:
            found.step(9, batches=2)
        except StatesAwayError as error:
            result["clipped"] = str(error)
    with mock.patch("torch.accelerator.is_available", return_value=True):
        try:
            tba.offload_optimizer(found.optimizer, policy, model=found.model)
        except UnsupportedError as error:
            result["refused"] = str(error)
    return result


# ---- frozen weights ------------------------------------------------------------------------------


def by_batch_as_views(net: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)


def by_trained_parameters(net: Net) -> nn.Module:
    return by_parameters(net, ignored_params={each for each in net.parameters() if not each.requires_grad})


FROZEN = (by_batch, by_batch_as_views, by_parameters, by_trained_parameters)
FROZEN_BYTES = LAYERS * 2 * 4 * WIDTH * INNER


def train_beside_frozen(
    rank: int, spread: Callable[[Net], nn.Module], *, attach_before: bool = False, attach_after: bool = False
) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model: Any = Net()
    for layer in model.layers:
        for part in (layer.up, layer.down):
            part.requires_grad_(requires_grad=False)
    found = []
    with TemporaryDirectory() as drive, ExitStack() as stack:
        policy: dict[str, Any] = {
            "default": "keep",
            "min_tensor_bytes": "2KiB",
            "weights": {"frozen": "offload"},
        }
        policy["store"] = {"kind": "file", "directories": drive}
        session = None
        if attach_before:
            session = stack.enter_context(tba.attach(model, policy, measure_memory=False))
        model = spread(model)
        if attach_after:
            session = stack.enter_context(tba.attach(model, policy, measure_memory=False))
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        for number in range(2 * STEPS):
            generator = torch.Generator().manual_seed(RANKS * number + rank)
            loss = model(torch.randn(ROWS, LENGTH, WIDTH, generator=generator)).pow(2).mean()
            loss.backward()
            found.append(local(loss.detach()))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        nbytes = session.weights.nbytes if session is not None and session.weights is not None else 0
    return [*found, *(local(each.detach()) for each in model.parameters())], nbytes


def compare_frozen(rank: int, spread: Callable[[Net], nn.Module], when: str) -> dict[str, Any]:
    """How many tensors differ and the bytes that were offloaded, or the error by which it was refused."""
    expected, _ = train_beside_frozen(rank, spread)
    try:
        found, nbytes = train_beside_frozen(rank, spread, **{f"attach_{when}": True})
    except (SessionError, UnsupportedError) as error:
        return {"refused": str(error)}
    pairs = zip(found, expected, strict=True)
    return {"different": sum(not same_bits(a, b) for a, b in pairs), "offloaded": nbytes}


def cases() -> dict[str, Callable[[int], dict[str, Any]]]:
    found: dict[str, Callable[[int], dict[str, Any]]] = {}
    for default, spreads in COMPARED.items():
        for spread in spreads:
            found[f"{default}, {spread}"] = partial(compare, spread, default=default)
    for spread in ("by batch", "by parameters", "by shards, with the parameters"):
        found[f"states, {spread}"] = partial(compare_states, spread=spread)
    for spread_by in (by_parameters, by_layers):
        found[f"backward, {spread_by.__name__}"] = partial(compare_updates_in_backward, spread=spread_by)
    for spread_by, when in itertools.product(FROZEN, ("before", "after")):
        found[f"frozen, {spread_by.__name__}, {when}"] = partial(compare_frozen, spread=spread_by, when=when)
    return found


def run_ranks(python: Warm, directory: Path, names: Iterable[str]) -> list[dict[str, dict[str, Any]]]:
    arguments = __file__, str(directory), *sorted(names)
    ended = python.run(*arguments, timeout=5 * PATIENCE)  # all are about sixty trainings
    assert ended.returncode == 0, ended.stderr[:4000]  # the rank that failed first
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def run_rank(rank: int, directory: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    meeting, patience = f"file://{directory}/meeting", timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=patience)
    all_of_them = cases()
    found = {name: all_of_them[name](rank) for name in names}
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    assert tba.attach  # imported here, and not by each rank
    gc.collect()
    gc.freeze()  # or each collection in a rank would copy all pages
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, directory, names)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
