"""The dtype that `auto` stands for, by device."""

from __future__ import annotations

import pytest
import torch

from medusa_train.models import precision
from medusa_train.models.precision import auto_dtype, choose_precision, parse_dtype


@pytest.mark.parametrize(
    ("device", "fast", "inference", "training"),
    [
        ("cpu", True, "bfloat16", "bfloat16"),
        ("cpu", False, "float32", "float32"),
        ("cuda", True, "bfloat16", "bfloat16"),
        ("cuda", False, "float16", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_has_it(
    monkeypatch: pytest.MonkeyPatch, device: str, fast: bool, inference: str, training: str
) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: fast)
    assert auto_dtype(torch.device(device)) == inference
    assert parse_dtype("auto", torch.device(device)) == getattr(torch, inference)
    assert str(choose_precision("auto", torch.device(device))) == training


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "amd", "fast"),
    [(True, True, False, True), (False, True, True, True), (False, True, False, False), (False, False, True, False)],
)
def test_bfloat16_on_a_cpu_takes_amx_or_avx512_by_amd(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, amd: bool, fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(precision, "_is_amd_cpu", lambda: amd)
    assert precision.has_fast_bf16(torch.device("cpu")) is fast


def test_precision_that_is_asked_for() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_precision(True, cpu).dtype == torch.bfloat16
    assert choose_precision(False, gpu).dtype == torch.float32
    assert choose_precision("auto", gpu, fp16=True).dtype == torch.float16
    assert choose_precision("auto", cpu, fp16=True).dtype == torch.float32
    assert parse_dtype(torch.float64) == parse_dtype("float64") == torch.float64
