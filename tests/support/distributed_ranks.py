"""Two ranks that train small models spread by PyTorch's own means, with a session and without: a program.

    python distributed_ranks.py DIRECTORY

Each rank trains under every case and leaves what came out in ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import KIB, PATIENCE, Drive, assert_all_given_back, session_for
from models import same_bits
from torch import Tensor, nn
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

if TYPE_CHECKING:
    from collections.abc import Callable

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
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
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
    """What one rank has of the layers in a pipeline."""

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


def train(
    spread: str, rank: int, default: str | None, steps: int
) -> tuple[list[Tensor], list[dict[str, int]]]:
    """Losses and parameters of a new model, and what each step of its session moved."""
    torch.manual_seed(0)
    model = SPREAD[spread](Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attached(model, default)
    found = []
    shared = spread in {"by columns", "by sequence"}
    for step in range(steps):
        torch.manual_seed(step)  # from which dropout draws
        generator = torch.Generator().manual_seed(step if shared else RANKS * step + rank)
        with session.step() if session is not None else nullcontext():
            loss = model(torch.randn(ROWS, LENGTH, WIDTH, generator=generator)).float().pow(2).mean()
            if session is not None:
                session.offloader.quiesce()  # or what is forwarded while it is written counts twice
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(local(loss.detach()))
    return [*found, *(local(parameter.detach()) for parameter in model.parameters())], moved(session)


def train_in_stages(rank: int, default: str | None, steps: int) -> tuple[list[Tensor], list[dict[str, int]]]:
    """The same in a pipeline of PyTorch's own, one forward and one backward in turn."""
    torch.manual_seed(0)
    stage = Stage(Net(), rank)
    example = torch.zeros(ROWS, LENGTH, WIDTH)
    pipeline = PipelineStage(stage, rank, RANKS, CPU, input_args=(example,))
    schedule = Schedule1F1B(pipeline, MICRO_BATCHES, loss_fn=lambda out, _: out.pow(2).mean())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    session = attached(stage, default)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(MICRO_BATCHES * ROWS, LENGTH, WIDTH, generator=generator)
        losses: list[Tensor] = []
        with session.step() if session is not None else nullcontext():
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach() for loss in losses]
    return [*found, *(parameter.detach() for parameter in stage.parameters())], moved(session)


def moved(session: Session | None) -> list[dict[str, int]]:
    """What the steps of a session moved; closes it."""
    if session is None:
        return []
    with session:
        assert_all_given_back(session)
    figures = (
        "offloaded_bytes",
        "forwarded_bytes",
        "kept_bytes",
        "rebuilt_bytes",
        "left_alone_scopes",
        "recomputed_scopes",
    )
    return [{figure: getattr(record, figure) for figure in figures} for record in session.report()]


def trained(
    spread: str, rank: int, default: str | None, steps: int
) -> tuple[list[Tensor], list[dict[str, int]]]:
    if spread == IN_STAGES:
        return train_in_stages(rank, default, steps)
    return train(spread, rank, default, steps)


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


COMPARED = {
    "offload": [*SPREAD, IN_STAGES],
    "offload-remat": [*SPREAD, IN_STAGES],
    "recompute": [*SPREAD, IN_STAGES],
    "recompute-offload": [*SPREAD, IN_STAGES],
    "recompute-except-attention": [*SPREAD, IN_STAGES],
    "auto": ["by batch", "by shards", "by parameters", "by columns", IN_STAGES],
}
"""Which placements are compared with plain training of models that are spread how."""


def cases() -> dict[str, Callable[[int], dict[str, Any]]]:
    """Every case by its name; each trains plainly and attached, on one rank."""
    found: dict[str, Callable[[int], dict[str, Any]]] = {}
    for default, spreads in COMPARED.items():
        for spread in spreads:
            found[f"{default}, {spread}"] = partial(compare, spread, default=default)
    return found


def run_rank(rank: int, directory: Path, names: list[str]) -> None:
    """Trains under the cases that are named."""
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
