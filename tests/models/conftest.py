"""What tests of the built kernels share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from medusa_train.models import few_rows_kernel


@pytest.fixture(scope="session")
def kernel(kernels: Path) -> None:
    """The kernels are loaded, on machines that can."""
    if not few_rows_kernel.can_run():
        pytest.skip("this CPU has no AVX512-BF16")
    if shutil.which(os.environ.get("CXX") or "c++") is None:
        pytest.skip("no C++ compiler")
    assert few_rows_kernel.load(kernels)
