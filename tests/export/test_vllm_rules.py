"""The check of a written directory: by the rules, and by vLLM's own config class where it can be imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from medusa_train.errors import CheckpointError
from medusa_train.export.vllm_rules import check_vllm_directory
from tests.checkpoint.others import vllm_config, vllm_tensors, write


def directory(tmp_path: Path, **config: object) -> Path:
    return write(tmp_path, vllm_tensors(), vllm_config(**config), "model.safetensors")


def test_the_rules_are_what_is_checked_where_vllm_is_not_installed(tmp_path: Path) -> None:
    assert "not installed" in check_vllm_directory(directory(tmp_path), "model.safetensors")
    with pytest.raises(CheckpointError, match="would stay random"):
        check_vllm_directory(directory(tmp_path, num_heads=7), "model.safetensors")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules under vLLM's names whose config class halves the heads, to see that it is asked."""

    class MedusaConfig:
        @staticmethod
        def from_pretrained(where: str) -> Any:
            config = json.loads((Path(where) / "config.json").read_text())
            return SimpleNamespace(to_dict=lambda: {**config, "num_heads": min(config["num_heads"], 3)})

    names = ["vllm", "vllm.transformers_utils", "vllm.transformers_utils.configs"]
    for name in [*names, "vllm.transformers_utils.configs.medusa"]:
        module = ModuleType(name)
        module.__dict__.update(__version__="0.0", __path__=[], __spec__=SimpleNamespace(), MedusaConfig=MedusaConfig)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("installed")
def test_vllm_itself_is_asked_where_it_is_installed(tmp_path: Path) -> None:
    assert "vLLM 0.0's config class" in check_vllm_directory(directory(tmp_path), "model.safetensors")
    assert "vLLM 0.0's" in check_vllm_directory(directory(tmp_path, num_heads=7), "model.safetensors")
