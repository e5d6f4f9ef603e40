"""Two ranks that train small models spread by PyTorch's own means, states offloaded and not: a program.

    python state_ranks.py DIRECTORY

Each rank leaves what came out in ``DIRECTORY/RANK.json``.
"""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from models import same_bits
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import tba_offload as tba
from tba_offload.errors import StatesAwayError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, WIDTH, DEPTH = 2, 64, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)  # of one row, so that a rank has none of it

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def by_batch(net: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def by_parameters(net: Net) -> nn.Module:
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def by_shards(net: Net) -> nn.Module:
    wrap = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(
        net, auto_wrap_policy=wrap, device_id=torch.device("cpu"), use_orig_params=True
    )


def by_layers(net: Net) -> nn.Module:
    """Each is the root of its own."""
    for layer in (*net.layers, net.head):
        fully_shard(layer)
    return net


SPREADS: dict[str, Callable[[Net], nn.Module]] = {
    "DDP": by_batch,
    "FSDP2": by_parameters,
    "FSDP1": by_shards,
    "FSDP2, many roots": by_layers,
}


class Run:
    """One training."""

    def __init__(self, spread: str) -> None:
        torch.manual_seed(5)
        self.model = SPREADS[spread](Net())
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int, *, most: float | None = 0.1, batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for batch in range(batches):
            generator = torch.Generator().manual_seed(100 * number + 10 * batch + dist.get_rank())
            self.model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        if most is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        entries = self.optimizer.state_dict()["state"]
        states = [value for entry in entries.values() for value in entry.values()]
        return [local(each.detach()) for each in [*self.model.parameters(), *states]]


def local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found


def differing(one: Run, other: Run) -> int:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return sum(not same_bits(a.reshape(-1), b.reshape(-1)) for a, b in pairs)


def compared(spread: str, directory: Path) -> dict[str, Any]:
    """How many tensors differ after training, and after a checkpoint went from one training to another."""
    plain, found, resumed = Run(spread), Run(spread), Run(spread)
    policy = {"states": {"sub_group_bytes": "16KiB"}, "store": {"directories": [str(directory)]}}
    with (
        tba.offload_optimizer(found.optimizer, policy) as states,
        tba.offload_optimizer(resumed.optimizer, policy),
    ):
        for number in range(4):
            plain.step(number)
            found.step(number)
        record = states.records[-1]
        result = {"trained": differing(found, plain), "away": record.states_bytes, "read": record.read_bytes}
        if spread != "FSDP1":  # whose own way is a function of its class
            resumed.model.load_state_dict(plain.model.state_dict())
            saved = copy.deepcopy(get_optimizer_state_dict(found.model, found.optimizer))
            set_optimizer_state_dict(resumed.model, resumed.optimizer, saved)
            for run in (plain, found, resumed):
                run.step(9)
            result["resumed"] = differing(resumed, plain) + differing(found, plain)
    result["closed"] = differing(found, plain)
    return result


def in_backward(spread: str, directory: Path) -> dict[str, Any]:
    """How many tensors differ where updates are made in backward, and which steps were."""
    plain, found = Run(spread), Run(spread)
    policy: dict[str, dict[str, Any]] = {
        "states": {"sub_group_bytes": "16KiB", "when": "backward", "micro_batches": 2},
        "store": {"directories": [str(directory)]},
    }
    result: dict[str, Any] = {"differing": [], "in_backward": []}
    with tba.offload_optimizer(found.optimizer, policy, model=found.model) as states:
        for number, batches in enumerate((2, 2, 1, 2, 2)):
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
        result["on host"] = refusal(found, policy)
    return result


def refusal(run: Run, policy: dict[str, dict[str, Any]]) -> str:
    """Why a policy is refused."""
    try:
        tba.offload_optimizer(run.optimizer, policy, model=run.model)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def rank(number: int, directory: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(number), WORLD_SIZE=str(RANKS))
    store = dist.FileStore(f"{directory}/meet", RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS, timeout=timedelta(seconds=60))
    try:
        results = {spread: compared(spread, Path(directory)) for spread in ("DDP", "FSDP2", "FSDP1")}
        for spread in ("FSDP2", "FSDP2, many roots"):
            results[f"{spread} in backward"] = in_backward(spread, Path(directory))
        Path(f"{directory}/{number}.json").write_text(json.dumps(results))
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each collection in a rank would copy all pages
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank, args=(number, sys.argv[1])) for number in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(each.exitcode or 0 for each in ranks))


if __name__ == "__main__":
    main()
