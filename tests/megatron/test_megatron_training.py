"""What the integration makes of Megatron's arguments and losses, rank by rank."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from children import environment
from pretrain_runs import slow

import tba_offload as tba
from tba_offload.config import BudgetConfig, OffloadConfig, StatesConfig, StoreConfig, WeightsConfig
from tba_offload.config.policy import LayerId, Placement, Policy, Rule
from tba_offload.errors import ConfigError, StoreError, TbaError, UnsupportedError
from tba_offload.megatron import training
from tba_offload.megatron.arguments import add_arguments
from tba_offload.megatron.loss import report_loss

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("drives", "ranks", "shares"),
    [
        ("", 2, ["", ""]),
        ("a", 2, ["a", "a"]),
        ("ab", 2, ["a", "b"]),
        ("abcd", 2, ["ac", "bd"]),
        ("abc", 2, ["ac", "b"]),
        ("ab", 4, ["a", "b", "a", "b"]),
        ("abc", 1, ["abc"]),
    ],
)
def test_ranks_of_a_node_share_out_its_drives(drives: str, ranks: int, shares: list[str]) -> None:
    config = OffloadConfig(
        store=StoreConfig(kind="file", directories=tuple(f"/mnt/{name}" for name in drives))
    )
    for rank, share in enumerate(shares):
        own = training._config_of_rank(config, rank, ranks)
        assert own.store.directories == tuple(Path(f"/mnt/{name}") for name in share)
        assert (own.store.kind, own.default) == (config.store.kind, config.default)


def test_layers_are_printed_in_groups_and_auto_says_that_plans_follow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = [LayerId(layer, f"decoder.layers.{layer}") for layer in range(12)]
    training._print_plan(Policy(default=Placement.AUTO, rules=(Rule("8-9", Placement.KEEP),)), layers)
    title, heading, _, *rows, last = capsys.readouterr().out.splitlines()
    assert (title, heading.split()) == ("tba-offload", ["Layers", "Name", "Placement", "Why"])
    assert [row.split() for row in rows] == [
        ["0-7", "decoder.layers.0-7", "auto", "default"],
        ["8-9", "decoder.layers.8-9", "keep", "rule", "'8-9'"],
        ["10-11", "decoder.layers.10-11", "auto", "default"],
    ]
    assert last == "auto: the planner decides between steps; each plan is told when it is made"
    encoder = [LayerId(layer, f"encoder.layers.{layer}", "encoder") for layer in range(2)]
    training._print_plan(Policy(default=Placement.OFFLOAD), [*encoder, layers[0]])
    said = capsys.readouterr().out
    assert "encoder:0-1" in said
    assert "planner" not in said


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This process as one of several; ``said`` is what each of them says in each collective, in turn."""

    def pretend(rank: int, *said: list[Any]) -> None:
        answers = iter(said)

        def of_all_ranks(own: list[Any]) -> list[Any]:
            answer = list(next(answers, own * ranks))
            return [
                each for part in [own if part is ... else part for part in answer] for each in _listed(part)
            ]

        ranks = max(len(said[0]), 2) if said else 2
        monkeypatch.setattr(training, "_of_all_ranks", of_all_ranks)
        monkeypatch.setattr(training, "_rank", lambda: rank)
        monkeypatch.setattr(training, "_ranks", lambda: ranks)

    return pretend


def _listed(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part]


@pytest.mark.parametrize(
    ("flags", "optimizer", "expected"),
    [
        (["--tba-optimizer-states", "offload"], "adam", ["attached", "loaded"]),
        (["--tba-optimizer-states", "offload"], None, ["loaded"]),
        (["--tba-placement", "offload"], "adam", ["loaded"]),
        ([], "adam", ["loaded"]),
    ],
)
def test_states_are_away_when_a_checkpoint_is_loaded_into_an_optimizer(
    flags: list[str], optimizer: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with weights that are kept; a checkpoint of the model comes before frozen ones are away."""
    arguments = add_arguments(argparse.ArgumentParser()).parse_args(flags)
    for name in ("megatron.training", "megatron.training.global_vars"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.training.global_vars"].get_args = lambda: arguments  # type: ignore[attr-defined]
    done: list[str] = []
    monkeypatch.setattr(training, "attach_model", lambda *given: done.append("attached") or given)

    def load_checkpoint(model: str, optimizer: str | None, *, strict: bool) -> tuple[object, ...]:
        done.append("loaded")
        return model, optimizer, strict

    load = training.attaching_first(load_checkpoint)
    assert load("model", optimizer, strict=False) == ("model", optimizer, False)
    assert done == expected
    frozen = OffloadConfig(states=StatesConfig(), weights=WeightsConfig(frozen="offload"))
    assert not training.can_be_loaded_into(frozen)


FIRST, SECOND = (LayerId(number, f"decoder.layers.{number}") for number in range(2))


def test_ranks_with_different_placements_are_refused(as_rank: Callable[..., None]) -> None:
    as_rank(0, [..., OffloadConfig(default=Placement.RECOMPUTE).to_yaml()])
    with pytest.raises(ConfigError, match="rank 1 was given another policy than rank 0"):
        training._world_of([FIRST], OffloadConfig())


def test_nodes_may_have_different_drives_and_budgets(as_rank: Callable[..., None]) -> None:
    as_rank(0, [..., OffloadConfig().to_yaml()])
    config = OffloadConfig(
        store=StoreConfig(kind="file", directories=("/here",)), budget=BudgetConfig(in_flight_bytes=1 << 20)
    )
    assert training._world_of([FIRST], config).layers == (FIRST,)


def test_the_world_has_the_layers_of_all_ranks_in_order(as_rank: Callable[..., None]) -> None:
    as_rank(1, [..., ...], [[SECOND], ...], ["one", "two"])
    world = training._world_of([FIRST], OffloadConfig())
    assert (world.layers, world.rank, world.ranks, world.run) == ((FIRST, SECOND), 1, 2, "one")


def test_stacks_come_in_the_order_of_the_model(as_rank: Callable[..., None]) -> None:
    encoder, decoder = (LayerId(0, f"{name}.layers.0", name) for name in ("encoder", "decoder"))
    as_rank(0, [..., ...], [[encoder], [decoder]], ["one", "two"])
    assert training._world_of([encoder], OffloadConfig()).layers == (encoder, decoder)


def test_a_model_without_layers_is_refused(as_rank: Callable[..., None]) -> None:
    as_rank(0, [..., ...], [[], []])
    with pytest.raises(UnsupportedError, match="on any rank"):
        training._world_of([], OffloadConfig())


def test_a_process_alone_has_no_others() -> None:
    world = training._world_of([FIRST], OffloadConfig())
    assert (world.layers, world.rank, world.ranks, world.run) == ((FIRST,), 0, 1, None)
    assert training._place_in_node() == (0, 1)


def test_the_place_in_a_node_follows_from_the_hosts(as_rank: Callable[..., None]) -> None:
    """Not from the environment: not every launcher says how many ranks a node has."""
    as_rank(3, ["a", "a", "b", "b", "b"])
    assert training._place_in_node() == (1, 3)


def test_of_each_layer_counts_what_the_rank_proposes_that_needs_it_most(as_rank: Callable[..., None]) -> None:
    keep, recompute = Placement.KEEP, Placement.RECOMPUTE
    first_stage = [((0.0, 1.0), {"0": keep, "1": keep}), ((0.0, 2.0), {"0": recompute, "1": keep})]
    second_stage = [((9.0, 1.0), {"2": recompute}), ((0.0, 5.0), {"2": keep})]
    as_rank(0, [*first_stage, *second_stage])
    agreed = training._agree({}, (0.0, 0.0))
    assert agreed == {"0": recompute, "1": keep, "2": recompute}  # bytes over the budget weigh more than time
    equal = (0.0, 0.0)
    as_rank(0, [(equal, {"0": keep}), (equal, {"0": recompute}), (equal, {"0": recompute})])
    assert training._agree({}, equal) == {"0": keep}


def test_a_rank_that_fails_lets_all_fail(as_rank: Callable[..., None]) -> None:
    as_rank(0, [None, "rank 1 on b: no such drive"])
    with (
        pytest.raises(TbaError, match="could not start on rank 1 on b: no such drive"),
        training._failing_together(),
    ):
        pass
    said: list[list[str | None]] = []
    as_rank(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_of_all_ranks", lambda own: said.append(own) or own)
        with pytest.raises(StoreError, match="full"), training._failing_together():
            raise StoreError("the drive is full")
    assert "the drive is full" in str(said)


@pytest.mark.parametrize(
    ("configured", "minutes", "later", "expected"),
    [
        (300.0, 10, None, 300.0),
        (300.0, 2, None, 60.0),
        (300.0, 10, 30, 15.0),
        (None, 2, None, None),
        (300.0, None, None, 300.0),
    ],
)
def test_a_standstill_ends_well_before_a_collective_times_out(
    configured: float | None, minutes: int | None, later: int | None, expected: float | None
) -> None:
    arguments = argparse.Namespace(
        distributed_timeout_minutes=minutes, distributed_timeout_seconds_after_init=later
    )
    config = OffloadConfig(store=StoreConfig(stall_seconds=configured))
    assert training._patient(config, arguments).store.stall_seconds == expected


def test_a_run_that_goes_on_gets_a_run_log_of_its_own(
    as_rank: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "run.jsonl"
    assert training._free_run_log(None) is None
    assert training._free_run_log(str(log)) == log
    log.write_text("{}")
    assert caplog.messages == []
    assert training._free_run_log(str(log)) == tmp_path / "run.2.jsonl"
    assert caplog.messages == [
        f"{log} holds an earlier run, so that this one is logged to {tmp_path / 'run.2.jsonl'}"
    ]
    as_rank(1, [1, 3])  # another rank has left two
    assert training._free_run_log(str(log)) == tmp_path / "run.3.rank1.jsonl"


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ([], None),
        (None, None),
        ([{}], None),
        ([{"lm loss": torch.tensor(2.0)}, {"lm loss": torch.tensor(4.0)}], 3.0),
        ([{"lm loss": torch.tensor([6.0, 3.0])}], 2.0),  # a sum, and the number of tokens in it
        ([{"lm loss": (torch.tensor(6.0), torch.tensor(3.0))}], 2.0),
        ([{"lm loss": 1.5}, {}], 1.5),
        ([{"lm loss": torch.tensor([6.0, 3.0])}, {"lm loss": torch.tensor([2.0, 1.0])}], 2.0),
        ([{"lm loss": torch.tensor([6.0, 1.0])}, {"lm loss": torch.tensor([2.0, 3.0])}], 2.0),  # not 3.3
        ([{"lm loss": torch.tensor([6.0, 3.0])}, {"lm loss": torch.tensor([0.0, 0.0])}], 2.0),
        ([{"lm loss": torch.tensor([0.0, 0.0])}], None),
    ],
)
def test_the_loss_of_a_step(losses: object, mean: float | None) -> None:
    layer = torch.nn.Linear(2, 2)
    with tba.attach(layer, {"default": "keep"}, layers=[layer]) as session:
        with session.step() as step:
            layer(torch.ones(2)).sum().backward()
            report_loss(step, losses)
    assert step.record is not None
    assert step.record.loss == mean


FAILING = """
import argparse, sys, types
from datetime import timedelta
import torch, torch.distributed as dist
rank, place = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{place}/init", timedelta(seconds=60), 2, rank)
from tba_offload.megatron import training
from tba_offload.megatron.arguments import add_arguments
flags = add_arguments(argparse.ArgumentParser()).parse_args(["--tba-placement", "offload"])
if rank == 1:
    flags.tba_policy = f"{place}/gone.yaml"
module = types.ModuleType("megatron.training.global_vars")
module.get_args = lambda: flags
sys.modules["megatron.training.global_vars"] = module
sys.modules["megatron.training"] = types.ModuleType("megatron.training")
try:
    training.attach_model([torch.nn.Linear(2, 2)])
finally:
    dist.destroy_process_group()  # a process that ends with gloo's threads at work may abort
"""
"""One of two ranks, of which the second cannot read its policy."""


@slow
def test_all_ranks_end_with_one_message_where_one_of_them_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True, env=environment()
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "Traceback" not in "".join(said)
    first, second = (next(line for line in text.splitlines() if "tba-offload" in line) for text in said)
    assert first.startswith("tba-offload: rank 0 on ")
    assert "could not start on rank 1 on " in first
    assert second.startswith("tba-offload: rank 1 on ")
    assert second.endswith("gone.yaml: cannot be read: No such file or directory")
