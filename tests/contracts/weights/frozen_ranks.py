"""Two ranks that train adapters on frozen weights, with a session and without: a program.

    python frozen_ranks.py DIRECTORY CASE...

Each rank leaves what came out in ``DIRECTORY/RANK.json``.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from harness import PATIENCE
from models import same_bits
from test_frozen_weights import WIDTH, Model, policy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tba_offload as tba
from tba_offload.errors import SessionError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, STEPS = 2, 3


def by_batch(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def by_batch_as_views(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def by_parameters(model: Model) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trained_only(model: Model) -> nn.Module:
    """Frozen weights are whole on each rank."""
    frozen = {each for each in model.parameters() if not each.requires_grad}
    for layer in model.layers:
        fully_shard(layer, ignored_params=frozen)
    return fully_shard(model, ignored_params=frozen)


SPREAD: dict[str, Callable[[Model], nn.Module]] = {
    each.__name__: each for each in (by_batch, by_batch_as_views, by_parameters, trained_only)
}


def local(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(spread: str, rank: int, directory: Path | None, *, is_first: bool) -> tuple[list[Tensor], int]:
    """Losses and parameters; and the bytes that were offloaded.

    Args:
        spread: How the model is spread.
        rank: The rank.
        directory: Of the store; without one there is no session.
        is_first: Whether the model is attached before it is spread.
    """
    model: Any = Model()
    model.layers[0].one.dropout.p = 0.0
    attached: Any = nullcontext()
    if directory is not None and is_first:
        attached = tba.attach(model, policy(directory), measure_memory=False)
    with attached as session:
        whole = SPREAD[spread](model)
        if directory is not None and not is_first:
            session = tba.attach(whole, policy(directory), measure_memory=False)
        with session if session is not None and not is_first else nullcontext():
            optimizer = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=1e-2)
            found = []
            for number in range(STEPS):
                torch.manual_seed(RANKS * number + rank)
                for _ in range(2):
                    loss = whole(torch.randn(8, WIDTH)).pow(2).mean()
                    loss.backward()
                    found.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            offloaded = session.weights.nbytes if session is not None and session.weights is not None else 0
    return [*found, *(local(each.detach()) for each in whole.parameters())], offloaded


def compare(rank: int, directory: Path, spread: str, *, is_first: bool) -> dict[str, Any]:
    """How many tensors differ, or the error by which it was refused; and the bytes that were offloaded."""
    expected, _ = train(spread, rank, None, is_first=False)
    try:
        found, offloaded = train(spread, rank, directory, is_first=is_first)
    except (SessionError, UnsupportedError) as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 # the test shows it, and other cases run
        return {"failed": repr(error)}
    pairs = zip(found, expected, strict=True)
    return {"different": sum(not same_bits(a, b) for a, b in pairs), "offloaded": offloaded}


def cases() -> dict[str, Callable[[int, Path], dict[str, Any]]]:
    """Every case by its name."""
    return {
        f"{spread}, {order}": partial(compare, spread=spread, is_first=order == "attached first")
        for spread in SPREAD
        for order in ("attached last", "attached first")
    }


def run_rank(rank: int, directory: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    meeting, patience = f"file://{directory}/meeting", timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=patience)
    drive = directory / f"drive {rank}"
    drive.mkdir()
    found = {name: cases()[name](rank, drive) for name in names}
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
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
