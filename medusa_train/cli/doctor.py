"""Describe this machine on a page for a bug report: `medusa-train --doctor`. Loads no model and no
data.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_train.config.schema import TrainConfig
from medusa_train.hide_secrets import excerpt
from medusa_train.io import installed_version

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "flash-attn",
    "triton",
    "datasets",
    "vllm",
    "ninja",
)
#: NCCL's buffers between the GPUs of a machine; containers have 64 MB by default.
SHARED_MEMORY = 1 << 30
TIMEOUT = 3  # seconds for each command
WITHOUT_TORCH = "torch cannot be imported, so nothing else was checked"

Line = tuple[str, str]


def doctor(read_config: Callable[[], TrainConfig] | None) -> int:
    """Print the page, the choices of a configuration last; return 1 if torch or transformers cannot
    be imported.
    """
    usable = True
    for name, value in machine():
        print(f"{name}: {value}", flush=True)
        usable = usable and value != WITHOUT_TORCH
    if read_config is not None and usable:
        for name, value in choices(read_config()):
            print(f"{name}: {value}", flush=True)
    return 0 if usable else 1


def machine() -> Iterator[Line]:
    """Yield what this machine has; what cannot be found out says why."""
    yield "medusa-train", installed_version("medusa-train")
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "system", f"{platform.platform()}, {os.cpu_count()} cores, memory {_ask(_memory)}"
    yield "packages", ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES)
    yield "C++ compiler", _ask(_compiler)
    yield "nvidia-smi", _ask(_driver)
    imported = _ask(_import_libraries)
    if imported != "imported":
        yield "torch", imported
        yield "result", WITHOUT_TORCH
        return
    import torch

    from medusa_train.models.precision import default_device

    device = default_device()
    visible = _ask(lambda: f"{torch.cuda.device_count()} GPUs visible")
    yield "torch", f"built for CUDA {torch.version.cuda}; {visible}"
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            yield f"GPU {index}", _ask(partial(_gpu, index))
    yield "environment", _environment()
    nccl = "not used without a GPU; gloo connects processes"
    if device.type == "cuda":
        nccl = _ask(_nccl)
    yield "NCCL", nccl
    yield "/dev/shm", _ask(_shared_memory)
    yield "bitsandbytes", _ask(partial(_bitsandbytes, device))
    yield "attention of packed rows", _ask(partial(_attention, device, torch.bfloat16))
    yield "torch.compile", _ask(partial(_compile, device))
    yield "bfloat16", _ask(partial(_bf16_speed, device))
    graphs = "none without a GPU; steps run as they are"
    if device.type == "cuda":
        graphs = _ask(_capture)
    yield "CUDA graphs", graphs


def choices(cfg: TrainConfig) -> Iterator[Line]:
    """Yield what a configuration asks for and what it gets on this machine."""
    import torch

    from medusa_train.models.precision import choose_precision, default_device, emulates
    from medusa_train.training.optimizer import build_optimizer

    device = default_device()
    precision = choose_precision(cfg.bf16, device, fp16=cfg.fp16)
    computes = f"computes in {precision}"
    if emulates(device, precision.dtype):
        computes += ", which this device emulates: slow"
    if cfg.fp16:
        if not _gpus():
            computes += ", since a CPU is slow in float16"
        yield "fp16: true", computes
    else:
        yield f"bf16: {str(cfg.bf16).lower()}", computes
    group = {
        "params": [torch.nn.Parameter(torch.zeros(1, device=device))],
        "lr": 0.0,
        "weight_decay": 0.0,
    }
    yield (
        f"optimizer: {cfg.optimizer}",
        _ask(lambda: build_optimizer(cfg.optimizer, [group], device)[1] or "as asked"),
    )
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(cfg, key):
            yield f"{key}: true", _ask(partial(_bitsandbytes, device))
    if cfg.sample_packing:
        yield "sample_packing: true", _ask(partial(_attention, device, precision.dtype))
    if cfg.torch_compile is True:
        yield "torch_compile: true", _ask(partial(_compile, device))
    if cfg.deepspeed is not None and importlib.util.find_spec("deepspeed") is None:
        yield "deepspeed", "is not installed, so training stops: pip install deepspeed"


def _ask(question: Callable[[], str]) -> str:
    """Return the answer, or the error in one line: a part that is missing or broken is what the
    page is for.
    """
    try:
        return question()
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"failed: {type(error).__name__}: {excerpt(first_line, 200)}"


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, check=True
    ).stdout.strip()


def _memory() -> str:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(line for line in lines if line.startswith("MemTotal"))  # MemTotal: 1234 kB
    return _gib(int(total.split()[1]) << 10)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        return f"{name} not found: compile: true and training in several processes need one"
    return _output(name, "--version").partition("\n")[0]


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not found"
    query = "--query-gpu=index,name,memory.total,driver_version,compute_cap"
    return "; ".join(_output("nvidia-smi", query, "--format=csv,noheader").splitlines())


def _import_libraries() -> str:
    import torch  # noqa: F401
    import transformers  # noqa: F401

    return "imported"


def _gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def _gpu(index: int) -> str:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return f"{name}, compute capability {major}.{minor}, {_gib(free)} free of {_gib(total)}"


def _environment() -> str:
    names = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "DS_", "CXX", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    variables = sorted(os.environ.items())
    found = [f"{name}={value}" for name, value in variables if name.startswith(names)]
    return ", ".join(found) or "no variable of CUDA, NCCL, OpenMP or PyTorch is set"


def _nccl() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def _shared_memory() -> str:
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_MEMORY and _gpus() > 1:
        return f"{_gib(free)} free: too little for NCCL; start containers with --shm-size=8g"
    return f"{_gib(free)} free"


def _bitsandbytes(device: torch.device) -> str:
    from medusa_train.models.loading import bitsandbytes_obstacle

    obstacle = bitsandbytes_obstacle(device)
    if obstacle is not None:
        return f"not usable: {obstacle}"
    kind = "GPU" if device.type == "cuda" else "CPU"
    return f"has a library for the {kind}"


def _attention(device: torch.device, dtype: torch.dtype) -> str:
    from transformers.utils import is_flash_attn_2_available

    from medusa_train.models.document_attention import flash_obstacle

    installed = is_flash_attn_2_available()
    obstacle = flash_obstacle(device.type, dtype, capped=False, supported=True, installed=installed)
    if obstacle is None:
        return "flash-attn's varlen kernel, if the model supports it"
    return f"one sdpa call per document ({obstacle})"


def _compile(device: torch.device) -> str:
    from medusa_train.models.compiled import has_compiler

    if has_compiler(device):
        return "can compile"
    needed = "a C++ compiler and Python.h" if device.type == "cpu" else "Triton"
    return f"not usable, `true` may be refused: it needs {needed}"


def _bf16_speed(device: torch.device) -> str:
    import torch

    from medusa_train.models.precision import emulates, has_fast_bf16

    if has_fast_bf16(device):
        return "fast"
    if emulates(device, torch.bfloat16):
        return "emulated"
    return "slow"


def _capture() -> str:
    import torch

    numbers = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
    graph.replay()
    found = numbers.tolist()
    if found != [1.0] * 8:
        return f"failed: a replay gave {found}"
    return "work"
