"""What all tests share: one folder for all that is built and compiled for this machine."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels() -> Path:
    """One for all tests to come, so that a kernel is built once and not for every run that a test makes."""
    default = Path(tempfile.gettempdir()) / f"medusa_train_tests_{getpass.getuser()}"
    return Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default)))
