"""Fixtures of all tests."""

import atexit
import gc
import getpass
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Keep what torch.compile and torch's C++ extensions build in one folder each: built once, not for
# every test. A fixture would be too late: torch sets its own default on import, and
# `compile_cache_dir` does not use that one.
COMPILED = Path(tempfile.gettempdir()) / f"medusa_train_tests_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
# A shell starts background jobs of a script with Ctrl-C ignored, and commands that tests start
# would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def traced_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled layers are traced by torch.compile and run as they are: in seconds and without a C++
    compiler.
    """
    import torch

    from medusa_train.models import compiled

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **keys: compile_(function, backend="eager", **keys)
    )
    monkeypatch.setattr(compiled, "has_compiler", lambda device: True)
    yield
    torch.compiler.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA GPU; benchmarks/gpu.sh runs it on one")
            )


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collection. The end of every training collects, and
    would look at 700,000 objects of modules and tests each time, for 0.4 s.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries report objects that are left at the end


def has_gpu() -> bool:
    """Return whether torch finds a CUDA GPU."""
    import torch  # takes seconds

    return torch.cuda.is_available()
