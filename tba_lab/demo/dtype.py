"""Which dtype this machine trains faster in: the matrix products of a linear layer, timed in each.

A CPU without bf16 instructions (AVX-512-bf16, AMX) multiplies bf16 matrices by a reference kernel, up to a
hundred times slower than fp32; which orientations of a product fall to it depends on PyTorch's build. So
nothing is looked up, all is measured.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

AUTO = "auto"
"""The dtype that is measured."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Data types that ``auto`` chooses from; of equally fast ones the first, whose activations are smaller."""

CHOICES = (AUTO, *DTYPES)
"""Values of ``--dtype``."""

_CPU_SHAPE = (128, 384, 384)
"""Rows, inputs, outputs: 38 MFLOP, an eighth of a second for a reference kernel of 0.3 GFLOP/s."""

_GPU_SHAPE = (2048, 2048, 2048)
"""Large enough that a GPU computes longer than the launch of a kernel takes."""

_ROUNDS = 5
_ENOUGH_SECONDS = 0.3
"""Seconds after which no further round is timed; the first one includes the loading of kernels."""


@dataclass(frozen=True)
class MatmulRates:
    """The three matrix products of a linear layer, FLOP/s.

    Attributes:
        output: ``x @ W.T``, the forward.
        input_gradient: ``grad @ W``.
        weight_gradient: ``grad.T @ x``.
    """

    output: float
    input_gradient: float
    weight_gradient: float

    @property
    def step(self) -> float:
        """All three in turn, each of as many operations: what a training step gets."""
        return statistics.harmonic_mean([self.output, self.input_gradient, self.weight_gradient])

    def __str__(self) -> str:
        orientations = (self.output, self.input_gradient, self.weight_gradient)
        return f"{_gflops(self.step)} ({' / '.join(map(_gflops, orientations))})"


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype and why it was taken.

    Attributes:
        dtype: ``bf16`` or ``fp32``.
        instruction_set: Of the CPU, as PyTorch uses it.
        rates: Name of each dtype to its rates; empty if the dtype was given.
    """

    dtype: str
    instruction_set: str
    rates: Mapping[str, MatmulRates]

    def __str__(self) -> str:
        if not self.rates:
            return f"dtype {self.dtype}, as given; instruction set {self.instruction_set}"
        measured = "; ".join(f"{name} {rates}" for name, rates in self.rates.items())
        return (
            f"dtype {self.dtype}, the faster one: {measured} GFLOP/s on one core for a layer's matrix "
            f"products (x @ W.T / grad @ W / grad.T @ x); instruction set {self.instruction_set}"
        )


def choose_dtype(dtype: str, *, device: torch.device | None = None) -> DtypeChoice:
    """Return the dtype to train in; :data:`AUTO` is measured, in less than a second.

    Args:
        dtype: One of :data:`CHOICES`.
        device: Where training takes place; the CPU by default.
    """
    if dtype != AUTO:
        return DtypeChoice(dtype, instruction_set(), {})
    with _one_thread():
        rates = measure_rates(device or torch.device("cpu"))
    return DtypeChoice(faster(rates), instruction_set(), rates)


def faster(rates: Mapping[str, MatmulRates]) -> str:
    """Return the dtype whose training step is faster; of equal ones the first.

    Args:
        rates: Name of each dtype to its rates.
    """
    return max(rates, key=lambda name: rates[name].step)


def instruction_set() -> str:
    """Return the vector instructions that PyTorch uses on this CPU, such as ``AVX2`` or ``AVX512``."""
    return torch.backends.cpu.get_cpu_capability()


def measure_rates(device: torch.device) -> dict[str, MatmulRates]:
    """Time the products in every dtype, in turn: whatever else the machine does hits all of them alike."""
    shape = _GPU_SHAPE if device.type == "cuda" else _CPU_SHAPE
    products = {name: _products(shape, dtype, device) for name, dtype in DTYPES.items()}
    best = {name: [float("inf")] * 3 for name in DTYPES}
    began = time.perf_counter()
    for round_ in range(_ROUNDS):
        if round_ >= 2 and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for name, three in products.items():
            best[name] = [min(pair) for pair in zip(best[name], map(_seconds, three), strict=True)]
    operations = 2 * shape[0] * shape[1] * shape[2]
    return {name: MatmulRates(*(operations / seconds for seconds in each)) for name, each in best.items()}


def _products(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[Callable[[], Tensor]]:
    rows, inputs, outputs = shape
    x = torch.ones(rows, inputs, dtype=dtype, device=device)
    weight = torch.ones(outputs, inputs, dtype=dtype, device=device)
    gradient = torch.ones(rows, outputs, dtype=dtype, device=device)
    return [lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x]


def _seconds(product: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    product()[0, 0].item()  # which waits for a GPU
    return time.perf_counter() - began


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would be what is timed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _gflops(rate: float) -> str:
    return f"{rate / 1e9:.3g}"
