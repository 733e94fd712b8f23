from __future__ import annotations

import subprocess
import sys

import pytest

import medusa_train


def test_importing_the_package_loads_no_library() -> None:
    code = "import sys, medusa_train; medusa_train.load; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_attributes_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        medusa_train.lood  # type: ignore[attr-defined]  # noqa: B018
