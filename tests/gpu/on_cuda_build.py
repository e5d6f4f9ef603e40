"""The CUDA build of PyTorch where there is no GPU: what the tests for a GPU would stumble over at once.

``tests/run_megatron_training.sh`` runs it where its environment has that build, on a version of Python that
machines with a GPU come with. The names that the package uses of CUDA's modules are read from its source.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from children import environment
from harness import COMPILER_LOOKS, config_for
from places import ROOT, TESTS
from torch import nn

import tba_offload as tba
from tba_offload.device import Accelerator, device_of
from tba_offload.device.streams import default_device
from tba_offload.errors import UnsupportedError

SOURCES = {path.name: path.read_text() for path in (ROOT / "tba_offload" / "device").glob("*.py")}


def used(pattern: str) -> list[str]:
    """The names that the sources use of something."""
    return sorted({name for source in SOURCES.values() for name in re.findall(pattern, source)})


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
                missing = getattr(error, "package", error.name)
                assert missing in {"lightning", "matplotlib", "pytorch_lightning", "transformers"}, error
"""


def test_every_module_can_be_imported_and_none_warns() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTING],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr


def collected(*chosen: str) -> list[str]:
    """The tests for a GPU that a pytest of its own finds."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:xdist", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^tests/\S+::\S.*$", done.stdout, re.MULTILINE)


SCRIPT = (ROOT / "tests" / "gpu.sh").read_text()
PLACES = re.findall(r"tests/[\w/.]+", re.findall(r"^TESTS=\(.*?\)", SCRIPT, re.MULTILINE | re.DOTALL)[0])


def test_the_script_for_a_gpu_knows_where_its_tests_are() -> None:
    marked = [path for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    assert len(marked) > 5
    assert all(any(path.is_relative_to(ROOT / place) for place in PLACES) for path in marked)
    assert len(collected(*PLACES)) > 100


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (
            "SMOKE",
            {
                "test_gpu.py",
                "test_store_file.py",
                "test_store_gds.py",
                "test_store_host.py",
                "test_streams.py",
            },
        ),
        ("APART", {"test_gpu.py"}),
        ("ALONE", {"test_gpu.py", "test_streams.py"}),
        (
            "ORDERLY",
            {
                "test_gpu.py",
                "test_store_file.py",
                "test_store_gds.py",
                "test_store_host.py",
                "test_streams.py",
            },
        ),
    ],
)
def test_the_script_for_a_gpu_chooses_tests_that_there_are(name: str, files: set[str]) -> None:
    (chosen,) = re.findall(rf"^{name}='(.*)'$", SCRIPT, re.MULTILINE)
    found = collected(*PLACES, "-k", chosen)
    assert {Path(test.partition("::")[0]).name for test in found} == files
    assert len(found) < 60
    for part in re.findall(r"\w{5,}", chosen):
        assert any(part in test for test in found), part


# Names and arguments


def test_a_gpu_has_a_device() -> None:
    device = device_of("cuda:0")
    assert isinstance(device, Accelerator)
    assert device.torch_device == torch.device("cuda", 0)
    assert device.compiled_graph() is None


def test_without_a_gpu_there_is_no_current_device() -> None:
    """PyTorch's current accelerator is what it is built for, unless it is asked to look."""
    assert not torch.cuda.is_available()
    with pytest.raises(UnsupportedError, match="PyTorch finds no accelerator here"):
        Accelerator()
    assert default_device().torch_device == torch.device("cpu")


def test_without_a_gpu_the_example_trains_on_the_cpu(tmp_path: Path) -> None:
    example = [ROOT / "examples" / "train_pytorch.py", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, *example],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stdout


@pytest.mark.parametrize("name", used(r"\b_?module\.([a-zA-Z]\w+|_sleep)\b"))
def test_the_module_of_cuda_has_what_is_asked_of_a_device(name: str) -> None:
    assert hasattr(torch.cuda, name)


@pytest.mark.parametrize("name", used(r"\bruntime\.(\w+)"))
def test_the_runtime_of_cuda_has_what_pins_memory(name: str) -> None:
    assert hasattr(torch._C._cudart, name)


def test_a_thread_can_wait_asleep_for_an_event() -> None:
    wanted = {"blocking", "enable_timing"}
    assert wanted <= set(inspect.signature(torch.cuda.Event.__new__).parameters)
    assert torch.cuda.Event(blocking=True).query()  # it was never recorded


def test_the_cache_of_pinned_memory_can_be_emptied() -> None:
    assert callable(getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)
    assert issubclass(torch.AcceleratorError, RuntimeError)


def test_the_trees_of_cuda_graphs_tell_where_they_are() -> None:
    """By names that are not PyTorch's to keep: a layer that is compiled to graphs would not be noticed."""
    from torch._inductor import cudagraph_trees

    arguments = inspect.signature(cudagraph_trees.get_manager).parameters
    assert list(arguments)[:2] == ["device_index", "create_if_none_exists"]
    assert cudagraph_trees.get_manager(0, create_if_none_exists=False) is None
    assert "self.current_node = " in inspect.getsource(cudagraph_trees.CUDAGraphTreeManager)


# The compiler


@COMPILER_LOOKS
def test_layers_that_inductor_compiles_can_be_tested() -> None:
    """What the compiler warns of is an error in tests: the first compiled test on a GPU would have failed."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
    for layer in model:
        layer.compile()
    with (
        tba.attach(model, config_for(in_flight=None, min_tensor_bytes=64), layers=list(model)) as session,
        session.step() as step,
    ):
        model(torch.ones(8, 8)).sum().backward()
    assert step.record is not None
    assert step.record.forwarded_bytes + step.record.offloaded_bytes > 0
