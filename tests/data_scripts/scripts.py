"""Load the scripts of data/ that are not importable by name, and compare texts by their n-grams."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from medusa_train.config.paths import PROJECT_ROOT


def load_script(name: str, register: pytest.MonkeyPatch | None = None) -> ModuleType:
    """Import `data/NAME`; a script with dataclasses is registered while `register` lasts."""
    spec = importlib.util.spec_from_file_location("script", PROJECT_ROOT / "data" / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if register is not None:
        register.setitem(sys.modules, "script", module)
    spec.loader.exec_module(module)
    return module


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9_']+", text.lower())


def ngrams(text: str, n: int = 8) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
