"""What the integration makes of Megatron's arguments and losses, and what ranks tell each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from harness import made

import tba_offload as tba
from tba_offload.megatron.training import report_loss
from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

pytestmark = pytest.mark.megatron

RANK = """
import argparse, json, sys, types
from datetime import timedelta
import torch, torch.distributed as dist
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from tba_offload.megatron import training
from tba_offload.megatron.arguments import add_arguments

rank, place, layers, extra, flags = int(sys.argv[1]), *map(json.loads, sys.argv[2:])
dist.init_process_group("gloo", f"file://{place}/init", timedelta(seconds=60), 2, rank)

class Layer(torch.nn.Linear, BaseTransformerLayer):
    def __init__(self, number):
        torch.nn.Linear.__init__(self, 4, 4)
        self.layer_number = number

arguments = add_arguments(argparse.ArgumentParser()).parse_args(flags, argparse.Namespace(**extra))
for name in ("megatron.training", "megatron.training.global_vars"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["megatron.training.global_vars"].get_args = lambda: arguments
if extra.get("gone"):
    arguments.tba_policy = f"{place}/gone.yaml"
model = torch.nn.Module()
model.decoder = torch.nn.Module()
model.decoder.layers = torch.nn.ModuleList(map(Layer, layers))
try:
    training.attach_model([model])
finally:
    dist.destroy_process_group()  # a process that ends with gloo's threads at work may abort
"""
"""One stage of a pipeline of two: attaches to layers of its own and ends."""


def run_ranks(
    python: Warm,
    place: Path,
    *flags: tuple[str, ...],
    layers: tuple[list[int], list[int]] = ([1, 2], [3, 4]),
    extra: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> list[tuple[int, str, str]]:
    programs = []
    for rank in range(2):
        settings = {"global_batch_size": 2} | extra[rank]
        given = [json.dumps(each) for each in (str(place), layers[rank], settings, flags[rank % len(flags)])]
        programs.append(["-c", RANK, str(rank), *given])
    ended = python.run_together(programs, [{}, {}], timeout=200)
    (place / "init").unlink(missing_ok=True)
    return [(rank.returncode, rank.stdout, rank.stderr) for rank in ended]


def test_two_stages_are_one_run(tmp_path: Path, python_with_megatron: Warm) -> None:
    """They know the layers of both, share drives out, and agree on a name for a log that was there before."""
    drives = [made(tmp_path / name) for name in "abc"]
    (tmp_path / "run.rank1.jsonl").write_text("{}")
    flags = ("--tba-directory", *map(str, drives), "--tba-run-log", str(tmp_path / "run.jsonl"))
    timeouts = ({"distributed_timeout_minutes": 2}, {"distributed_timeout_seconds_after_init": 30})
    found = run_ranks(python_with_megatron, tmp_path, flags, extra=timeouts)
    assert [status for status, *_ in found] == [0, 0], found
    headers = [read_run_log(tmp_path / f"run.2.rank{rank}.jsonl").header for rank in range(2)]
    assert [(each.rank, each.ranks) for each in headers] == [(0, 2), (1, 2)]
    assert headers[0].run == headers[1].run
    assert headers[0].run is not None
    assert list(headers[0].plan) == list(headers[1].plan) == [f"decoder.layers.{n}" for n in range(4)]
    stores = [yaml.safe_load(each.policy or "")["store"] for each in headers]
    assert [each["directories"] for each in stores] == [[str(drives[0]), str(drives[2])], [str(drives[1])]]
    assert [each["stall_seconds"] for each in stores] == [60, 15]  # half of what collectives wait
    assert "0-3" in found[0][1]
    assert "decoder.layers.0-3" in found[0][1]
    assert found[1][1] == ""


@pytest.mark.parametrize(
    ("flags", "options", "said"),
    [
        (
            (("--tba-placement", "offload"), ("--tba-placement", "recompute")),
            {},
            ("rank 1 has a different policy from rank 0", "rank 0 has a different policy from rank 1"),
        ),
        pytest.param(
            (("--tba-placement", "offload"),),
            {"extra": ({}, {"gone": True})},
            ("could not start on rank 1 on ", "gone.yaml: cannot be read: No such file or directory"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["policies", "a file"],
)
def test_all_ranks_end_with_one_message_where_one_of_them_fails(
    flags: tuple[tuple[str, ...], ...],
    options: dict[str, Any],
    said: tuple[str, str],
    tmp_path: Path,
    python_with_megatron: Warm,
) -> None:
    found = run_ranks(python_with_megatron, tmp_path, *flags, **options)
    for rank, (status, _, errors) in enumerate(found):
        assert status == 1
        assert "Traceback" not in errors
        (line,) = [line for line in errors.splitlines() if line.startswith("tba-offload: ")]
        assert line.startswith(f"tba-offload: rank {rank} on ")
        assert said[rank] in line


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
        ([{"lm loss": torch.tensor([6.0, 1.0])}, {"lm loss": torch.tensor([2.0, 3.0])}], 2.0),  # not 3.3
        ([{"lm loss": torch.tensor([0.0, 0.0])}], float("nan")),
    ],
)
def test_the_loss_of_a_step(losses: object, mean: float | None) -> None:
    layer = torch.nn.Linear(2, 2)
    with tba.attach(layer, {"default": "keep"}, layers=[layer]) as session:
        with session.step() as step:
            layer(torch.ones(2)).sum().backward()
            report_loss(step, losses)
    assert step.record is not None
    assert repr(step.record.loss) == repr(mean)


# Where a script, or a package, is missing


def test_what_is_no_script_of_megatron_is_one_line(tmp_path: Path, python_with_torch: Warm) -> None:
    run = python_with_torch.run
    finished = run("-m", "tba_offload", "launch", str(tmp_path / "none.py"))
    assert finished.returncode == 1
    assert finished.stderr.startswith("Error: no script")
    alone = tmp_path / "alone.py"
    alone.write_text("raise SystemExit(7)\n")
    inner = tmp_path / "megatron" / "training"
    inner.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").touch()
    (inner / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='six')\n")
    finished = run("-m", "tba_offload", "launch", str(alone))
    assert finished.returncode == 1
    said = "megatron.training needs the module six, which is missing. Run pip install 'tba-offload[scripts]'"
    assert finished.stderr == f"Error: alone.py: {said}\n"
