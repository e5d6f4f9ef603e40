"""The dtype that a machine trains faster in: the decision, and that measuring it ends soon."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba_lab.demo.dtype import (
    AUTO,
    CHOICES,
    DTYPES,
    DtypeChoice,
    MatmulRates,
    choose_dtype,
    faster,
    instruction_set,
    measure_rates,
)

rates = st.floats(1e6, 1e15)
three = st.builds(MatmulRates, rates, rates, rates)


def gflops(*each: float) -> MatmulRates:
    return MatmulRates(*(1e9 * rate for rate in each))


@pytest.mark.parametrize(
    ("bf16", "fp32", "expected"),
    [
        (gflops(354, 401, 376), gflops(109, 112, 32), "bf16"),  # AVX-512 with bf16
        (gflops(20, 1.3, 29), gflops(73, 85, 88), "fp32"),  # AVX2: one orientation has a reference kernel
        (gflops(200, 0.3, 200), gflops(30, 30, 30), "fp32"),  # the slow one takes nearly all the time
        (gflops(60, 60, 60), gflops(60, 60, 60), "bf16"),  # half the bytes
    ],
)
def test_the_dtype_is_that_of_the_faster_step(bf16: MatmulRates, fp32: MatmulRates, expected: str) -> None:
    assert faster({"bf16": bf16, "fp32": fp32}) == expected


@given(bf16=three, fp32=three)
def test_no_other_dtype_takes_less_time(bf16: MatmulRates, fp32: MatmulRates) -> None:
    def seconds(each: MatmulRates) -> float:
        return 1 / each.output + 1 / each.input_gradient + 1 / each.weight_gradient

    found = {"bf16": bf16, "fp32": fp32}
    times = {name: seconds(each) for name, each in found.items()}
    assert times[faster(found)] == pytest.approx(min(times.values()))


def test_every_dtype_and_product_is_measured_on_one_thread(two_threads: None) -> None:
    threads: list[int] = []

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.Tensor.matmul or function is torch.Tensor.__matmul__:
                threads.append(torch.get_num_threads())
            return function(*args, **(kwargs or {}))

    with Noting():
        chosen = choose_dtype(AUTO)
    assert len(threads) >= 2 * 3 * 2
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2
    assert list(chosen.rates) == list(DTYPES)
    assert chosen.dtype == faster(chosen.rates)
    assert all(rate > 0 for each in chosen.rates.values() for rate in vars(each).values())


def test_measuring_ends_where_a_product_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    now = 0.0

    def seconds(product: object) -> float:
        nonlocal now
        calls.append(product)
        now += 0.1
        return 0.1

    monkeypatch.setattr("tba_lab.demo.dtype._seconds", seconds)
    monkeypatch.setattr("tba_lab.demo.dtype.time.perf_counter", lambda: now)
    found = measure_rates(torch.device("cpu"))
    assert len(calls) == 2 * 3 * 2  # two rounds: the first loads kernels
    assert [each.step for each in found.values()] == [pytest.approx(2 * 128 * 384 * 384 / 0.1)] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_that_is_given_is_not_measured(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_lab.demo.dtype.measure_rates", lambda _: pytest.fail("measured"))
    chosen = choose_dtype(dtype)
    assert chosen == DtypeChoice(dtype, instruction_set(), {})
    assert (
        str(chosen) == f"dtype {dtype}, as given; instruction set {torch.backends.cpu.get_cpu_capability()}"
    )


def test_the_line_has_dtype_rates_and_instruction_set() -> None:
    found = {"bf16": gflops(20, 1.25, 32), "fp32": gflops(60, 60, 60)}
    assert str(DtypeChoice("fp32", "AVX2", found)) == (
        "dtype fp32, the faster one: bf16 3.4 (20 / 1.25 / 32); fp32 60 (60 / 60 / 60) GFLOP/s on one core "
        "for a layer's matrix products (x @ W.T / grad @ W / grad.T @ x); instruction set AVX2"
    )


def test_choices_of_the_option() -> None:
    assert CHOICES == ("auto", "bf16", "fp32")
