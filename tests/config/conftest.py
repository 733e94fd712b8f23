"""A base model whose tokenizer names no chat template, as those of Vicuna and of many base models."""

import json
import shutil
from pathlib import Path

import pytest

from tests.training.conftest import chats, target_model_dir

__all__ = ["bare_target_model", "chats", "target_model_dir"]


@pytest.fixture
def bare_target_model(target_model_dir: Path, tmp_path: Path) -> Path:
    where = tmp_path / "bare"
    shutil.copytree(target_model_dir, where)
    (where / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((where / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (where / "tokenizer_config.json").write_text(json.dumps(settings))
    return where
