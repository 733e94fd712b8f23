"""The package itself: instant to import, and one function."""

from __future__ import annotations

import subprocess
import sys

import pytest

import medusa_train


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, medusa_train; assert not {'torch', 'transformers'} & set(sys.modules); medusa_train.load"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' in sys.modules"], check=True)


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        medusa_train.lood  # type: ignore[attr-defined]  # noqa: B018
