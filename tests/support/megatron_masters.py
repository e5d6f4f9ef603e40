"""Two optimizers of megatron-core, one plain and one whose masters are away, given the same gradients.

    python megatron_masters.py KIND DIRECTORY

KIND is one of :data:`KINDS`. What differs is an error; figures are printed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from live_bytes import ResizedBytes, nbytes_of
from models import assert_same_tensors, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from tba_offload.states import OptimizerStates


class Kind(NamedTuple):
    dtype: torch.dtype
    distributed: bool
    formats: tuple[str | None, ...]


KINDS = {
    "float16, fp16": Kind(torch.float16, False, (None,)),
    "distributed, bf16": Kind(torch.bfloat16, True, ("dp_reshardable", "fully_reshardable")),
}

HIDDEN, LAYERS, SEQUENCE, VOCAB = 64, 6, 16, 256
SUB_GROUP = 3 * 4 * 4 * HIDDEN * HIDDEN
"""Bytes of the largest parameter with its states: a twentieth of all."""


class Run:
    """A model and its optimizer, plain without a store; gradients are random numbers."""

    def __init__(self, kind: Kind, store: Path | None) -> None:
        self.kind = kind
        self.chunk = make_chunk(kind)
        self.parameters: list[nn.Parameter] = list(self.chunk.parameters())
        self.optimizer = make_optimizer(kind, self.chunk)
        self.states: tuple[OptimizerStates, ...] = ()
        if store is not None:
            self.states = tuple(offload(self.optimizer, store))

    def masters(self) -> list[Tensor]:
        return [parameter.main_param for parameter in self.parameters]  # type: ignore[attr-defined]

    def gradients(self, seed: int, *, is_infinite: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        for parameter in self.parameters:
            gradient: Any = parameter.main_grad  # type: ignore[attr-defined]
            gradient.copy_(torch.randn(parameter.shape, generator=generator))
            if self.optimizer.chained_optimizers[0].grad_scaler:
                gradient.mul_(self.optimizer.get_loss_scale())
            if is_infinite:
                gradient.fill_(float("inf"))

    def step(self, seed: int, *, is_infinite: bool = False) -> tuple[Any, ...]:
        """One update; clipping changes all gradients."""
        self.gradients(seed, is_infinite=is_infinite)
        done, norm, zeros = self.optimizer.step()
        return bool(done), None if norm is None else float(norm).hex(), zeros

    def close(self) -> None:
        for states in self.states:
            states.close()


def make_chunk(kind: Kind) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from tba_lab.megatron_cpu import seed_all

    seed_all(1)
    precision = {"bf16": kind.dtype == torch.bfloat16, "fp16": kind.dtype == torch.float16}
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4}
    on_a_cpu = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}
    config = TransformerConfig(**sizes, **on_a_cpu, **precision, params_dtype=kind.dtype)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=SEQUENCE)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=kind.distributed
    )
    made: nn.Module = DistributedDataParallel(config, settings, Float16Module(config, model))
    return made


def make_optimizer(kind: Kind, chunk: nn.Module) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    precision = {"bf16": kind.dtype == torch.bfloat16, "fp16": kind.dtype == torch.float16}
    scaling = {"initial_loss_scale": 2.0**10, "hysteresis": 1, "params_dtype": kind.dtype}
    adam = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0}
    more = {"log_num_zeros_in_grad": True, "use_distributed_optimizer": kind.distributed}
    return get_megatron_optimizer(OptimizerConfig(**adam, **precision, **scaling, **more), [chunk])


def offload(optimizer: Any, store: Path) -> Iterator[OptimizerStates]:
    import tba_offload as tba
    from tba_offload.megatron.optimizer import children_of, follow, masters_of

    states = tba.StatesConfig(sub_group_bytes=SUB_GROUP)
    config = tba.OffloadConfig(states=states, store=tba.StoreConfig(kind="file", directories=(str(store),)))
    children = children_of(optimizer, states)
    masters = masters_of(children)
    for child in children:
        offloaded = tba.offload_optimizer(child.optimizer, config, masters=masters)
        follow(child, offloaded)
        yield offloaded


VIEWS = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.dtype,
}
"""Operations that change no memory: four of five."""


class Resident(TorchDispatchMode):
    """The most bytes of states and masters that a run has in memory, where programs see them."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in VIEWS:
            return result
        states = [
            value.nbytes
            for child in self._run.optimizer.chained_optimizers
            for entry in child.optimizer.state.values()
            for value in entry.values()
            if type(value) is torch.Tensor
        ]
        self.most = max(self.most, sum(states) + sum(map(nbytes_of, self._run.masters())))
        return result


def check_same(found: Run, expected: Run) -> None:
    assert_same_tensors(found.parameters, expected.parameters)
    assert sum(map(nbytes_of, found.masters())) == 0


def check_same_values(found: Any, expected: Any, place: str = "") -> int:
    if isinstance(expected, torch.Tensor):
        assert type(found) in (torch.Tensor, type(expected)), (place, type(found))
        assert same_bits(found.detach().cpu(), expected.detach().cpu()), place
        return 1
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        return sum(check_same_values(found[key], expected[key], f"{place} {key}") for key in expected)
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        return sum(
            check_same_values(a, b, f"{place} {number}")
            for number, (a, b) in enumerate(zip(found, expected, strict=True))
        )
    assert found == expected, place
    return 0


# Checkpoints


def sharded(run: Run, form: str | None, *, is_loading: bool) -> Mapping[str, Any]:
    model = run.chunk.module.sharded_state_dict()  # type: ignore[operator]
    metadata = {} if form is None else {"distrib_optim_sharding_type": form}
    optimizer = run.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def save_sharded(run: Run, form: str | None, place: Path) -> None:
    from megatron.core import dist_checkpointing

    place.mkdir()
    dist_checkpointing.save(sharded(run, form, is_loading=False), str(place))


def load_sharded(run: Run, form: str | None, place: Path) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(sharded(run, form, is_loading=True), str(place))
    run.chunk.module.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])


def save(run: Run, place: Path) -> Any:
    """As Megatron's older format does it; returns all of it."""
    place.mkdir()
    torch.save(run.optimizer.state_dict(), place / "optimizer.pt")
    if run.kind.distributed:
        run.optimizer.save_parameter_state(str(place / "states.pt"))
    return [torch.load(path, weights_only=False) for path in sorted(place.iterdir())]


def load(run: Run, place: Path) -> None:
    run.optimizer.load_state_dict(torch.load(place / "optimizer.pt", weights_only=False))
    if run.kind.distributed:
        run.optimizer.load_parameter_state(str(place / "states.pt"))


# What is tried


def train(kind: Kind, store: Path, _: Path) -> dict[str, Any]:
    has_scaler = kind.dtype == torch.float16
    figures: dict[str, Any] = {"grown": []}
    with ResizedBytes() as meter:
        plain, away = Run(kind, None), Run(kind, store)
        for seed in range(5):
            is_infinite = has_scaler and seed == 2
            expected = plain.step(seed, is_infinite=is_infinite)
            assert expected[0] is not is_infinite
            away.gradients(seed, is_infinite=is_infinite)
            before = meter.now() - sum(states.device_bytes for states in away.states)
            with meter.watching():
                done, norm, zeros = away.optimizer.step()
            assert (bool(done), None if norm is None else float(norm).hex(), zeros) == expected
            figures["grown"].append(meter.most - before)
            check_same(away, plain)
    records = [record for states in away.states for record in states.records]
    figures["updates"] = len(records)
    figures["slots"] = max(record.slot_bytes for record in records)
    figures["away"] = records[-1].states_bytes
    figures["masters"] = sum(master.nbytes for master in away.masters())
    away.close()
    assert_same_tensors(away.masters(), plain.masters())
    check_same_values(away.optimizer.state_dict(), plain.optimizer.state_dict())
    return figures


def checkpoints(kind: Kind, store: Path, place: Path) -> dict[str, Any]:
    """What is saved plain is loaded with masters away, and the other way round, in each format."""
    plain, away = Run(kind, None), Run(kind, store)
    for seed in range(2):
        plain.step(seed)
        away.step(seed)
    figures: dict[str, Any] = {
        "tensors": check_same_values(save(away, place / "away"), save(plain, place / "plain"))
    }
    for form in kind.formats:
        save_sharded(away, form, place / f"away {form}")
        save_sharded(plain, form, place / f"plain {form}")
    check_same(away, plain)
    crossed = Run(kind, store), Run(kind, None)
    for run in crossed:
        run.chunk.load_state_dict(plain.chunk.state_dict())
    with Resident(crossed[0]) as resident:
        load(crossed[0], place / "plain")
    loaded = [resident.most]
    load(crossed[1], place / "away")
    compare(*crossed, steps=2)
    for form in kind.formats:
        crossed = Run(kind, store), Run(kind, None)
        with Resident(crossed[0]) as resident:
            load_sharded(crossed[0], form, place / f"plain {form}")
        loaded.append(resident.most)
        load_sharded(crossed[1], form, place / f"away {form}")
        compare(*crossed, steps=2)
    return figures | {"loaded": loaded}


def compare(away: Run, plain: Run, *, steps: int) -> None:
    for seed in range(10, 10 + steps):
        assert away.step(seed) == plain.step(seed)
        check_same(away, plain)
    away.close()
    assert_same_tensors(away.masters(), plain.masters())
    check_same_values(away.optimizer.state_dict(), plain.optimizer.state_dict())


def reload(kind: Kind, store: Path, _: Path) -> dict[str, Any]:
    """Masters are set to parameters, which a checkpoint without an optimizer has changed."""
    plain, away = Run(kind, None), Run(kind, store)
    with ResizedBytes() as meter:
        for run in (plain, away):
            run.step(0)
            for parameter in run.parameters:
                parameter.data.mul_(3)
            before = meter.now()
            with meter.watching():
                run.optimizer.reload_model_params()
    compare(away, plain, steps=2)
    return {"grown": [meter.most - before]}


def main(arguments: list[str]) -> None:
    from tba_lab.megatron_cpu import single_process
    from tba_lab.megatron_cpu_scripts import install_for_scripts

    install_for_scripts()
    kind, place = KINDS[arguments[0]], Path(arguments[1])
    store = place / "store"
    store.mkdir()
    with single_process():
        figures = [attempt(kind, store, place) for attempt in (train, reload, checkpoints)]
    assert list(store.iterdir()) == []
    sys.stdout.write(f"\n{json.dumps(figures)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
