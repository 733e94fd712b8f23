"""A pretend CUDA device for a torch without CUDA: tensors that report `cuda:0` and hold their
values in CPU memory.

It shows where the project mixes devices, where the host waits for the GPU, and what a CUDA graph
could not capture. It does not show what a real GPU computes, how fast, or in how much memory. It
must be loaded before torch, which looks for a device's hooks once, and it stays until the process
ends:

    python -m pytest -p tests.cuda_shadow.device tests/cuda_shadow/decoding.py

What a transfer or a wait is follows torch's notes on CUDA semantics, "Asynchronous execution" and
"Use pinned memory buffers", and those on CUDA graphs, "Constraints". `torch.inference_mode` becomes
`no_grad`: moving a wrapper tensor to the device where it is fails in inference mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = str(HERE.parents[1] / "medusa_train")

if "torch" in sys.modules:
    raise ImportError("the pretend CUDA device must be loaded before torch")


def load_guard() -> None:
    """Build guard.cpp, once per torch and source, and load it beside torch's libraries."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent
    key = hashlib.sha256(
        (home / "version.py").read_bytes() + (HERE / "guard.cpp").read_bytes()
    ).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"medusa_train_guard_{key}.so"
    if not built.exists():
        part = built.with_suffix(f".{os.getpid()}.part")
        flags = ["-shared", "-fPIC", "-O1", "-std=c++20", f"-I{home / 'include'}"]
        subprocess.run(["g++", *flags, str(HERE / "guard.cpp"), "-o", str(part)], check=True)
        part.rename(built)
    for library in (home / "lib" / "libc10.so", home / "lib" / "libtorch_cpu.so", built):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


load_guard()
# weights are read to the device, and threads are out of its sight
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

import bitsandbytes  # noqa: E402, F401  # looks for CUDA libraries where torch has a GPU: before torch has one
import torch  # noqa: E402
import transformers.integrations.bitsandbytes  # noqa: E402, F401
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

GPU = torch.device("cuda", 0)
#: Operators whose result, or whose result's shape, the host reads.
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"}
WAITS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class DeviceError(RuntimeError):
    """An operator got tensors of two devices."""


class CaptureError(RuntimeError):
    """The host waits for the device within a capture."""


class Transfers(Counter[str]):
    """How often the host waited for the device: `upload`, `pinned upload` (no wait), `download`,
    `wait`.

    Attributes:
        places: the same by kind and line of the package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[tuple[str, str]] = Counter()


_listeners: list[Transfers] = []
_capturing = False
_inside = False  # an operator on the values in CPU memory


@contextlib.contextmanager
def counted() -> Iterator[Transfers]:
    """Count transfers and waits."""
    _listeners.append(Transfers())
    try:
        yield _listeners[-1]
    finally:
        _listeners.pop()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Raise `CaptureError` at any transfer or wait."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Compute on the CPU alone, without the checks of the pretend device, which take most of the time."""
    global _inside
    before, _inside = _inside, True
    try:
        yield
    finally:
        _inside = before


def _record(kind: str) -> None:
    if _capturing:
        raise CaptureError(f"{kind} within a capture, at {_place(6)}")
    for transfers in _listeners:
        transfers[kind] += 1
        transfers.places[kind, _place(2)] += 1


def _place(depth: int) -> str:
    """Return the innermost lines of the package that run."""
    lines, frame = [], sys._getframe(1)
    while frame is not None and len(lines) < depth:
        if frame.f_code.co_filename.startswith(PACKAGE):
            lines.append(f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class GpuTensor(torch.Tensor):
    """A tensor on the pretend device.

    Attributes:
        held: its values, in CPU memory.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> GpuTensor:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=GPU,
            requires_grad=requires_grad,
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:
        return f"GpuTensor({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GpuTensor:
        copied: Any = GpuTensor(self.held.detach().clone(), self.requires_grad)
        copied._is_param = getattr(self, "_is_param", False)
        return copied

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def is_pinned(self, *args: Any) -> bool:
        return False

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()


class GpuMode(TorchDispatchMode):
    """Serves `device="cuda"` where no argument is on the device yet."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _inside:
            return op(*args, **(kwargs or {}))
        if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                result = op.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values that are held, after the checks of its devices."""
    global _inside
    name = op._schema.name.removeprefix("aten::")
    tensors = list(_tensors((args, *kwargs.values())))
    on_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
    to_gpu = (
        on_gpu if kwargs.get("device") is None else torch.device(kwargs["device"]).type == "cuda"
    )
    if name in ("_to_copy", "copy_"):
        source = args[name == "copy_"]
        to_gpu = isinstance(args[0], GpuTensor) if name == "copy_" else to_gpu
        if to_gpu != isinstance(source, GpuTensor):
            without_wait = kwargs.get("non_blocking") or args[2:3] == (True,)
            _record("download" if not to_gpu else "pinned upload" if without_wait else "upload")
    elif on_gpu:
        _check(name, args, tensors)
    held = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, GpuTensor)}
    changed = {"device": torch.device("cpu")} if to_gpu and kwargs.get("device") is not None else {}
    changed |= {key: False for key in ("pin_memory", "non_blocking") if kwargs.get(key)}
    before, _inside = _inside, True
    try:
        given = {key: _mapped(_values, value) for key, value in {**kwargs, **changed}.items()}
        result = op(*_mapped(_values, args), **given)
    finally:
        _inside = before

    def returned(out: Any) -> Any:
        if not isinstance(out, Tensor) or id(out) in held:
            return held.get(id(out), out)  # written in place: the tensor that was given
        return GpuTensor(out) if to_gpu else out

    return _mapped(returned, result)


# An operator has no other containers than lists and tuples; torch's pytree takes four times as long.
def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with each entry of its nested lists and tuples changed."""
    if isinstance(value, list):
        return [_mapped(change, one) for one in value]
    if isinstance(value, tuple):
        return tuple(_mapped(change, one) for one in value)
    return change(value)


def _check(name: str, args: Any, tensors: list[Tensor]) -> None:
    """Refuse tensors of the CPU beside those of the device, but for numbers and indices, and count
    waits.
    """
    others = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor) and tensor.dim()]
    if name in INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            _record("wait")
        elif any(not isinstance(index, GpuTensor) for index in indices):
            _record("upload")
        others = [tensor for tensor in others if all(tensor is not index for index in indices)]
    if others:
        raise DeviceError(f"{name}: tensors on cuda:0 and on the CPU, at {_place(4)}")
    if name in WAITS:
        _record("wait")


def _values(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, GpuTensor) else leaf


def _factory(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `torch.tensor` or `torch.as_tensor` for the device, whose C++ reads the data without
    an operator.
    """

    @functools.wraps(plain)
    def made(
        data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any
    ) -> Tensor:
        device = (
            device
            if device is not None
            else data.device
            if isinstance(data, Tensor)
            else torch.empty(0).device
        )
        out = data if isinstance(data, GpuTensor) else plain(data, device="cpu", **options)
        out = out.to(device, **({"dtype": options["dtype"]} if options.get("dtype") else {}))
        return out.requires_grad_() if requires_grad else out

    return made


def install() -> None:
    """Let torch report one GPU of compute capability 9.0 with 80 GB."""
    torch._C._set_only_lift_cpu_tensors(True)
    # a wrapper can't take another one's place
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.tensor, torch.as_tensor = _factory(torch.tensor), _factory(torch.as_tensor)
    torch.inference_mode = torch.no_grad
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "memory_allocated": 0,
    }
    answers |= {
        "get_device_name": "pretend GPU",
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
    }
    answers |= {
        "mem_get_info": (80 << 30, 80 << 30),
        "get_device_properties": SimpleNamespace(total_memory=80 << 30, multi_processor_count=132),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    answers |= dict.fromkeys(
        ("_lazy_init", "set_rng_state", "synchronize", "empty_cache", "set_device")
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    GpuMode().__enter__()  # for the rest of the process


install()
