"""The dtype that `auto` stands for, by device, and the memory that is left."""

import os
import platform
import subprocess
import sys

import psutil
import pytest
import torch
from torch import nn

from medusa_train.models import precision
from medusa_train.models.precision import (
    WeightMemory,
    auto_dtype,
    choose_kernels,
    choose_precision,
    emulates,
    is_out_of_memory,
    parse_dtype,
    return_free_memory,
)


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
    [
        (True, True, False, True),
        (False, True, True, True),
        (False, True, False, False),
        (False, False, True, False),
    ],
)
def test_bfloat16_on_a_cpu_takes_amx_or_avx512_by_amd(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, amd: bool, fast: bool
) -> None:
    monkeypatch.setattr(precision, "emulates", lambda device, dtype: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(
        precision, "_cpu_info", lambda key: "AuthenticAMD" if amd else "GenuineIntel"
    )
    assert precision.has_fast_bf16(torch.device("cpu")) is fast


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),
    reason="the variables are oneDNN's, for x86",
)
def test_the_instructions_that_onednn_may_use_decide_and_not_those_of_the_cpu() -> None:
    """With these variables a newer processor computes as one without AVX512 does."""
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    code = (
        "import torch; from medusa_train.models.precision import emulates, has_fast_bf16\n"
        "cpu = torch.device('cpu')\n"
        "print([emulates(cpu, getattr(torch, d)) for d in ('bfloat16', 'float16', 'float32')])\n"
        "print(has_fast_bf16(cpu))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines() == ["[True, True, False]", "False"]


def test_a_gpu_without_instructions_for_bfloat16_emulates_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    gpu = torch.device("cuda")
    assert emulates(gpu, torch.bfloat16)
    assert not emulates(gpu, torch.float16)
    assert not precision.has_fast_bf16(gpu)


def test_precision_that_is_asked_for() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_precision(True, cpu).dtype == torch.bfloat16
    assert choose_precision(False, gpu).dtype == torch.float32
    assert choose_precision("auto", gpu, fp16=True).dtype == torch.float16
    assert choose_precision("auto", cpu, fp16=True).dtype == torch.float32
    assert parse_dtype(torch.float64) == parse_dtype("float64") == torch.float64


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
                " bytes."
            ),
            True,
        ),
        (
            RuntimeError(
                "[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to"
                " allocate 9"
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_cpu_allocators_error_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_memory_of_weights_by_dtype_with_quantized_weights_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(10, 10, bias=False)
    model.packed = nn.Parameter(torch.zeros(30, dtype=torch.uint8), requires_grad=False)
    weights = WeightMemory.of(model, CPU)
    assert (weights.numbers, weights.quantized) == (100, 30)
    monkeypatch.setattr(precision, "free_memory", lambda device: 429)
    assert weights.fit("bfloat16")
    assert not weights.fit("float32")
    monkeypatch.setattr(precision, "free_memory", lambda device: None)
    assert weights.fit("float32")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_of_freed_tensors_goes_back_to_the_system() -> None:
    # of 200 MB in blocks of the heap, some are still used
    kept = [torch.ones(1 << 13) for _ in range(6000)][::100]
    before = psutil.Process().memory_info().rss
    return_free_memory()
    assert psutil.Process().memory_info().rss < before - 50e6 * len(kept) / 20


def test_attention_on_a_gpu_is_not_cudnns() -> None:
    """It would build a plan for each of a tree's key lengths."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_kernels(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        choose_kernels(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
