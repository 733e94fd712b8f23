"""Fixtures of all tests."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_cache_dir() -> None:
    """Keep what torch.compile builds in one folder, so that it is built once and not for every run of a test."""
    default = Path(tempfile.gettempdir()) / f"medusa_train_tests_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default))
