"""The lane of DeepSpeed in the benchmark of optimizer states, as far as it goes without DeepSpeed."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from models import same_bits
from places import BENCHMARKS

sys.path.append(str(BENCHMARKS))  # after all others: it has an io.py

import states
import zero_lane

if TYPE_CHECKING:
    from pathlib import Path


def test_a_layer_yields_the_gradient_that_it_is_given() -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn((8, 8), generator=generator) for _ in range(3)]
    model = torch.nn.Sequential(*(zero_lane.Given(8, 8, bias=False) for _ in gradients))
    for layer, gradient in zip(model, gradients, strict=True):
        layer.gradient = gradient
    model(torch.zeros(())).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert same_bits(parameter.grad, gradient)


def test_a_lane_of_deepspeed_without_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.argv", ["states.py", str(tmp_path), "--deepspeed"])
    with pytest.raises(SystemExit):
        states.main()
    assert "pip install deepspeed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
