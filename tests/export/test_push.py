"""Uploads: requests to the hub's client, and errors when it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.errors import ConfigError, MedusaError
from medusa_train.export.push import local_base_model, push


class Hub:
    """Stands for the hub's client; remembers what it was asked."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self.refusal = refusal

    def create_repo(self, repo: str, **keys: Any) -> Any:
        self.asked.append((repo, keys))
        return SimpleNamespace(repo_id=f"me/{repo}", __str__=lambda: "address")

    def upload_folder(self, **keys: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(keys)


@pytest.mark.parametrize("private", [True, False])
def test_a_directory_becomes_a_repository(tmp_path: Path, private: bool) -> None:
    hub = Hub()
    push(tmp_path, "llama-medusa", private=private, api=hub)
    assert hub.asked == [
        ("llama-medusa", {"repo_type": "model", "private": private, "exist_ok": True}),
        {
            "repo_id": "me/llama-medusa",
            "folder_path": str(tmp_path),
            "repo_type": "model",
            "ignore_patterns": ["eval/*"],
        },
    ]


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="hf auth login") as caught:
        push(tmp_path, "me/x", private=True, api=Hub(OSError("401 unauthorized")))
    assert "401 unauthorized" in str(caught.value)


def test_an_invalid_repository_name_is_refused_before_uploading(tmp_path: Path) -> None:
    hub = Hub()
    with pytest.raises(ConfigError, match="push_to_hub"):
        push(tmp_path, "not a/name/at all", private=True, api=hub)
    assert hub.asked == []


def test_a_missing_network_is_reported_before_uploading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.export.push.hub_is_unreachable", lambda: True)
    with pytest.raises(MedusaError, match="can't be reached"):
        push(tmp_path, "me/x", private=True)


@pytest.mark.parametrize(("base", "expected"), [("/models/mine", "/models/mine"), ("owner/name", None), (None, None)])
def test_a_local_base_model_is_detected(tmp_path: Path, base: str | None, expected: str | None) -> None:
    assert local_base_model(tmp_path) is None  # a merged backbone names none
    (tmp_path / "config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert local_base_model(tmp_path) == expected
