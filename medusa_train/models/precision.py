"""Which dtype a device computes in, and how much memory it has left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from medusa_train.errors import MedusaError


def default_device() -> torch.device:
    """Return the current GPU, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of matrix products under the active autocast of a device type; None without
    autocast.
    """
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _cpu_info("model name") or platform.machine()


def _cpu_info(key: str) -> str:
    """Return the first value of a key of /proc/cpuinfo; if there is none,
    `platform.processor()`.
    """
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor()


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bfloat16 faster than float32, judged by its instruction
    sets.

    A CPU needs AMX, or AMD's AVX512-BF16. Intel's AVX512-BF16 without AMX was measured at half the
    speed of float32.
    """
    if emulates(device, torch.bfloat16):  # `ONEDNN_MAX_CPU_ISA` may disable instructions of the CPU
        return False
    if device.type == "cpu":
        # torch has no public API for this on CPUs
        if torch.cpu._is_amx_tile_supported():
            return True
        avx512_bf16 = bool(torch.cpu._is_avx512_bf16_supported())
        return avx512_bf16 and "AuthenticAMD" in _cpu_info("vendor_id")
    return device.type == "cuda"


def emulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device has no instructions for matrix products in `dtype`.

    On a CPU they then take up to 100 times as long as in float32, because torch uses its own loop
    instead of oneDNN. Most CPUs emulate float16; CPUs without AVX512 emulate bfloat16 as well.
    """
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        # torch has no public API for this; builds without oneDNN (macOS) lack the operators
        if not torch.backends.mkldnn.is_available():
            return True
        if dtype == torch.bfloat16:
            return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if device.type == "cuda" and dtype == torch.bfloat16:
        return not torch.cuda.is_bf16_supported(including_emulation=False)
    return False


def auto_dtype(device: torch.device | None = None, *, float16: bool = True) -> str:
    """Return the dtype that `auto` means: "bfloat16" if `has_fast_bf16`, else "float16" on a GPU,
    else "float32".

    Args:
        device: device to compute on; by default the GPU if there is one.
        float16: whether a GPU without bfloat16 may use float16. Training passes False, because
            float16 gradients need loss scaling (`fp16: true`).
    """
    device = device or default_device()
    if has_fast_bf16(device):
        return "bfloat16"
    if float16 and device.type == "cuda":
        return "float16"
    return "float32"


def parse_dtype(dtype: str | torch.dtype, device: torch.device | None = None) -> torch.dtype:
    """Return the torch dtype of a name such as "bfloat16" or "auto" (see `auto_dtype`)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = auto_dtype(device) if dtype == "auto" else dtype
    parsed = getattr(torch, str(name), None)
    if not isinstance(parsed, torch.dtype):
        raise MedusaError(f"dtype: must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return parsed


@contextmanager
def exact_buffers(module: nn.Module) -> Iterator[None]:
    """Within this context, `.to()` moves the buffers of `module` to another device, but does not
    change their dtype.

    transformers keeps rotary frequencies in float32 buffers. In bfloat16, the angles of late
    positions would be off by radians.
    """
    # keep duplicates: a tensor may be registered under two names
    exact = dict(module.named_buffers(remove_duplicate=False))
    yield
    for name, moved in list(module.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = exact[name].to(moved.device)


@dataclass(frozen=True)
class Precision:
    """Precision of a training run.

    The target model is loaded in `dtype`. Drafts keep float32 master weights and run under autocast
    to `dtype`.
    """

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for drafts; it does nothing in float32."""
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32
        )

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(
    bf16: bool | Literal["auto"], device: torch.device, *, fp16: bool = False
) -> Precision:
    """Return the precision for the keys `bf16` and `fp16`. On a CPU, float16 is slow and becomes
    float32.
    """
    if fp16:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        return Precision(device, dtype)
    if bf16 == "auto":
        return Precision(device, parse_dtype(auto_dtype(device, float16=False)))
    return Precision(device, torch.bfloat16 if bf16 else torch.float32)


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of memory available on the device; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        # Linux overcommits memory, and kills a process that exceeds it without an exception, so
        # check beforehand.
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return None if match is None else 1024 * int(match[1])


#: Messages of CPU allocators (Linux, Windows) and of CUDA calls; PyTorch's CUDA allocator raises
#: its own exception.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator|not enough memory|CUDA error: out of"
    r" memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that a CPU or a GPU ran out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


@contextmanager
def catch_out_of_memory() -> Iterator[list[str]]:
    """Suppress an out-of-memory error (see `is_out_of_memory`) and append its message to the
    yielded list.

    The message, unlike the error, keeps no frames with tensors alive.
    """
    caught: list[str] = []
    try:
        yield caught
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        caught.append(str(error))


def release_memory() -> None:
    """Free the memory of unreferenced objects, for the next model."""
    gc.collect()  # modules and hooks refer to each other
    return_free_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def choose_kernels(device: torch.device) -> None:
    """Set which kernels this process uses on `device`.

    Training and decoding call it once before they load a model: the setting is global.
    """
    if device.type == "cuda":
        # cuDNN's attention, torch's first choice on sm90 and sm100, builds a plan for each shape.
        # Trees and unpacked batches have a new shape every step, and a plan took 0.4 s on a B200
        # (FunASR issue 3704; not measured here)
        torch.backends.cuda.enable_cudnn_sdp(False)


def limit_kernel_cache() -> None:
    """Let oneDNN cache 64 kernels with their buffers. Its default, 1,024, takes gigabytes if shapes
    vary.

    oneDNN reads the variable once, when the process runs its first kernel.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def return_free_memory() -> None:
    """Return the memory of freed tensors from the C library to Linux. Otherwise the library keeps
    more with every new batch shape.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # only glibc has it
        trim(0)


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a model's weights.

    Attributes:
        device: device of the weights.
        numbers: how many weights are stored in the model's dtype.
        quantized: bytes of quantized weights, which do not depend on the dtype.
    """

    device: torch.device
    numbers: int
    quantized: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> WeightMemory:
        """Count the weights of a loaded model."""
        numbers = 0
        quantized = 0
        for parameter in model.parameters():
            if parameter.is_floating_point():
                numbers += parameter.numel()
            else:
                quantized += parameter.numel() * parameter.element_size()
        return cls(device, numbers, quantized)

    def fit(self, dtype: str) -> bool:
        """Return whether one more copy of the weights in `dtype` fits into the free memory."""
        free = free_memory(self.device)
        if free is None:
            return True
        needed = self.numbers * getattr(torch, dtype).itemsize + self.quantized
        return bool(needed <= free)
