"""Builds and loads attention and products of few rows for CPUs with AVX512-BF16; knows no model and no tree.

torch's own attention reaches a fifth of what such a CPU multiplies where there are few queries, and less with one; and
a draft's heads, one row each, take longer in calls of their own than in one. Both are built once for each version of
torch, beside what torch.compile makes, and need a C++ compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

SOURCES = tuple(Path(__file__).with_name(name) for name in ("few_rows.cpp", "few_rows_product.cpp"))
MOST_SIZE = 256  # of a head
_LANES = 16  # columns of a panel

_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "fma")
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp", *(f"-m{name}" for name in _INSTRUCTIONS))
_log = logging.getLogger(__name__)


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel is loaded and made for these: bfloat16 on a CPU, heads of 32, 64, ... 256, values alike."""
    size = query.shape[3]
    return (
        serves(query.dtype, query.device)
        and size % 32 == 0
        and size <= MOST_SIZE
        and value.shape[3] == size
        and (mask is None or (mask.dtype == torch.bfloat16 and mask.stride(3) == 1 and _whole(mask, query, key)))
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


def _whole(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    return mask.shape[0] in (1, query.shape[0]) and mask.shape[2:] == (query.shape[2], key.shape[2])


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[B, H, q, d] over [B, H_kv, S, d] -> [B, q, H, d].

    A row whose mask hides every key becomes 0, also where it does so by the lowest number instead of minus infinity.
    """
    return torch.ops.medusa_train.few_rows(query, key, value, mask, scaling)


class Products:
    """G linear maps of one size with the weights laid out, each for a few rows of its own, in one call.

    Args:
        weights: G of them, [out, in] in bfloat16, `in` being even; what is laid out is a copy of them.
        biases: G of them, [out]; or None.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> None:
        self._columns, inputs = weights[0].shape
        panels = -(-self._columns // _LANES)
        # two neighbouring inputs of sixteen columns lie together, as the instruction takes them
        self._laid_out = weights[0].new_empty(len(weights), panels, inputs // 2, _LANES, 2)
        for place, weight in zip(self._laid_out, weights, strict=True):
            whole = pad(weight.detach(), (0, 0, 0, panels * _LANES - self._columns))
            place.copy_(whole.view(panels, _LANES, inputs // 2, 2).transpose(1, 2))
        self._bias = None if biases is None else torch.stack([bias.detach() for bias in biases])

    def __call__(self, x: Tensor) -> Tensor:
        """[g, B, in] -> [g, B, out] by the first g maps; rows in bfloat16, dense in their last dimension.

        Raises:
            RuntimeError: they are not, or there are more of them than maps, or of another size.
        """
        return torch.ops.medusa_train.few_rows_product(x, self._laid_out, self._bias, self._columns)


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it is loaded, and made for such tensors."""
    return dtype == torch.bfloat16 and device.type == "cpu" and is_loaded()  # in this order: asked in every layer


def is_loaded() -> bool:
    """Whether `load` has succeeded in this process."""
    return hasattr(torch.ops.medusa_train, "few_rows")


def load(home: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Load the kernel, built in `home` where it is not there yet (twenty seconds); says whether it can be used.

    Where this CPU or its compiler can't, that is no error: torch's own kernel does the same.
    """
    if is_loaded():
        return True
    if not can_run():
        return False
    try:
        library = build(home, environ)
        try:
            torch.ops.load_library(str(library))
        except OSError:  # broken, or made where other libraries are: once more
            library.unlink()
            torch.ops.load_library(str(build(home, environ)))
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        _log.info("few rows stay with torch's own kernels, since ours could not be built: %s", error)
        return False
    torch.library.register_fake("medusa_train::few_rows", _shape)
    return True


def can_run() -> bool:
    """Whether this CPU has the instructions, under an operating system where the flags are known to be right."""
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return sys.platform == "linux" and has_bf16 is not None and bool(has_bf16())


def build(home: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The library in `home`, made if it is not there. Processes may do so at the same time.

    Raises:
        OSError: there is no C++ compiler, or no room. ImportError: torch can't say where its headers are.
        subprocess.SubprocessError: the compiler fails.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    name = environ.get("CXX") or "c++"
    if (compiler := shutil.which(name)) is None:
        raise FileNotFoundError(f"there is no C++ compiler ({name})")
    where = [*(f"-isystem{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths())]
    command = [compiler, *_FLAGS, *where, *map(str, SOURCES), "-lc10", "-ltorch_cpu"]
    said = f"{torch.__version__} {command}".encode()
    made_of = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES) + said)
    library = home / f"few_rows_{made_of.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    home.mkdir(parents=True, exist_ok=True)
    # a name of its own until it is whole: nobody loads, and nobody waits for, what another process has begun
    with tempfile.TemporaryDirectory(dir=home) as begun:
        made = Path(begun) / library.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
            raise subprocess.SubprocessError(first)
        made.replace(library)
    return library


def _shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What torch.compile has to know of the result."""
    batch, heads, rows, size = query.shape
    return query.new_empty(batch, rows, heads, size)
