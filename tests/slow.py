"""Let something take long, as on a busy disk."""

import time
from importlib import import_module
from typing import Any

import pytest

SECONDS = 0.6


def slow_down(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Let the function `place`, as "module.name", begin `SECONDS` late."""
    module, _, name = place.rpartition(".")
    real = getattr(import_module(module), name)

    def wrapper(*given: Any, **keys: Any) -> Any:
        time.sleep(SECONDS)
        return real(*given, **keys)

    monkeypatch.setattr(place, wrapper)
