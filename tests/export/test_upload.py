"""Uploads of exports to the hub, whose client is replaced."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.errors import ConfigError, MedusaError
from medusa_train.export import upload
from medusa_train.export.upload import push


class Hub:
    """Stands for the hub's client; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refusal: Exception | None = None

    def create_repo(self, repo: str, **keys: Any) -> Any:
        self.asked.append((repo, keys))
        return SimpleNamespace(repo_id=f"me/{repo}", __str__=lambda: "address")

    def upload_folder(self, **keys: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(keys)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    client = Hub()
    monkeypatch.setattr(upload, "HfApi", lambda: client)
    monkeypatch.setattr(upload, "hub_is_unreachable", lambda: False)
    monkeypatch.setattr(upload, "check_network", lambda: None)
    return client


def test_a_directory_becomes_a_repository(hub: Hub, tmp_path: Path) -> None:
    push(tmp_path, "llama-medusa", private=True)
    uploaded = {"repo_id": "me/llama-medusa", "folder_path": str(tmp_path), "repo_type": "model"}
    assert hub.asked == [
        ("llama-medusa", {"repo_type": "model", "private": True, "exist_ok": True}),
        {**uploaded, "ignore_patterns": ["eval/*", "compiled/*"]},
    ]


def test_an_upload_that_the_hub_refuses_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.refusal = OSError("401 unauthorized")
    with pytest.raises(MedusaError, match="failed: 401 unauthorized\nLog in with `hf auth login`"):
        push(tmp_path, "me/x", private=True)


def test_a_name_that_no_repository_can_have_is_an_error(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="push_to_hub"):
        push(tmp_path, "not a/name/at all", private=True)
    assert hub.asked == []


def test_without_a_network_the_message_names_the_export(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "hub_is_unreachable", lambda: True)
    with pytest.raises(MedusaError, match=f"can't be reached.*the export is in {tmp_path}"):
        push(tmp_path, "me/x", private=True)
    assert hub.asked == []
