"""Rates of the machine, which floors are divided by."""

import pytest
import shapes
import torch
from shapes import default_dtypes, matrix_rate, measure_rates, read_bandwidth

CPU = torch.device("cpu")


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a buffer and a matrix that take no time."""
    monkeypatch.setattr(
        shapes, "read_bandwidth", lambda device, seconds: read_bandwidth(device, seconds, 1 << 20)
    )
    monkeypatch.setattr(
        shapes, "matrix_rate", lambda device, dtype, seconds: matrix_rate(device, dtype, seconds, 8)
    )
    rates = measure_rates(CPU, ["float32", "bfloat16"], 0.001)
    assert list(rates.matrix) == ["float32", "bfloat16"]
    assert min(rates.bandwidth, *rates.matrix.values()) > 0


@pytest.mark.parametrize(
    ("emulated", "width", "multiplied"),
    [(False, None, 2048), (False, 512, 512), (True, None, 256), (True, 512, 256), (True, 64, 64)],
)
def test_the_rate_of_an_emulated_dtype_is_that_of_narrow_matrices(
    emulated: bool, width: int | None, multiplied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 2,048 one product takes half a minute on a CPU without AVX512."""
    monkeypatch.setattr(shapes, "emulates", lambda device, dtype: emulated)
    monkeypatch.setattr(shapes, "fastest_call", lambda call, device, seconds: 1.0)
    assert matrix_rate(CPU, torch.bfloat16, width=width) == 2 * multiplied**3


@pytest.mark.parametrize("emulated", [False, True])
def test_bfloat16_is_measured_unless_the_cpu_emulates_it(
    emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shapes, "emulates", lambda device, dtype: emulated)
    assert ("bfloat16" in default_dtypes()) is not emulated
