"""A backbone whose tokenizer names no chat template, as those of Vicuna and of many base models."""

import json
import shutil
from pathlib import Path

import pytest

from tests.training.conftest import backbone_dir, chats

__all__ = ["backbone_dir", "bare_backbone", "chats"]


@pytest.fixture
def bare_backbone(backbone_dir: Path, tmp_path: Path) -> Path:
    where = tmp_path / "bare"
    shutil.copytree(backbone_dir, where)
    (where / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((where / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (where / "tokenizer_config.json").write_text(json.dumps(settings))
    return where
