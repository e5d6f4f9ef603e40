"""What the integration makes of Megatron's arguments and losses, rank by rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tba_offload.config import OffloadConfig, StoreConfig
from tba_offload.errors import ConfigError
from tba_offload.megatron import training
from tba_offload.policy import LayerId, Placement


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
def test_ranks_of_a_node_share_out_its_drives(
    drives: str, ranks: int, shares: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OffloadConfig(
        store=StoreConfig(kind="file", directories=tuple(f"/mnt/{name}" for name in drives))
    )
    for rank, share in enumerate(shares):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        own = training._config_of_rank(config)
        assert own.store.directories == tuple(Path(f"/mnt/{name}") for name in share)
        assert (own.store.kind, own.default) == (config.store.kind, config.default)


def test_ranks_with_different_policies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig()
    other = OffloadConfig(default=Placement.RECOMPUTE)

    def of_all_ranks(own: list[object]) -> list[object]:
        return [*own, other.to_yaml() if own == [config.to_yaml()] else own[0]]

    monkeypatch.setattr(training, "_of_all_ranks", of_all_ranks)
    with pytest.raises(ConfigError, match="rank 1 was given another policy than rank 0"):
        training._world_of([LayerId(0, "decoder.layers.0")], config)


def test_the_world_has_the_layers_of_all_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (LayerId(number, f"decoder.layers.{number}") for number in range(2))

    def of_all_ranks(own: list[object]) -> list[object]:
        return [second, *own] if own == [first] else own * 2

    monkeypatch.setattr(training, "_of_all_ranks", of_all_ranks)
    monkeypatch.setattr(training, "_ranks", lambda: 2)
    world = training._world_of([first], OffloadConfig())
    assert (world.layers, world.rank, world.ranks) == ((first, second), 0, 2)
    assert world.run


def test_a_process_alone_has_no_others() -> None:
    layer = LayerId(0, "decoder.layers.0")
    world = training._world_of([layer], OffloadConfig())
    assert (world.layers, world.rank, world.ranks, world.run) == ((layer,), 0, 1, None)


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
    ],
)
def test_the_loss_of_a_step(losses: object, mean: float | None) -> None:
    assert training._mean_loss(losses) == mean
