"""The CUDA build of PyTorch where there is no GPU: what the tests for a GPU would stumble over at once.

``tests/run_megatron_training.sh`` runs it where its environment has that build, on a version of Python that
machines with a GPU come with. The names that the package uses of CUDA's modules are read from its source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from children import run_python
from places import ROOT

from tba_offload.device import Accelerator, device_of

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_the_cuda_build() -> None:
    assert torch.version.cuda is not None


IMPORTING = """
import importlib, pkgutil, sys
import torch
for package in ("tba_offload", "tba_lab"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:  # of something optional
                missing = (error.__cause__ or error).name
                assert missing in {"lightning", "matplotlib", "pytorch_lightning", "transformers"}, error
"""


def test_every_module_can_be_imported_and_none_warns() -> None:
    done = run_python("-W", "error", "-c", IMPORTING, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# Names and arguments


def test_a_gpu_has_a_device() -> None:
    device = device_of("cuda:0")
    assert isinstance(device, Accelerator)
    assert device.torch_device == torch.device("cuda", 0)


def test_without_a_gpu_the_example_trains_on_the_cpu(tmp_path: Path) -> None:
    done = run_python(ROOT / "examples" / "train_pytorch.py", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stdout
