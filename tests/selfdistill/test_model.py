"""By what models of the same name are told apart."""

from pathlib import Path

import pytest

from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill.model import weights_digest

FILES = [
    "model-00001-of-00002.safetensors",
    "pytorch_model.bin",
    "adapter/adapter_model.safetensors",
    "adapter/adapter_model.bin",
    "heads/medusa_lm_head.safetensors",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("key", ["base_model", "heads"])
def test_weights_that_were_trained_again_are_others(key: str, name: str, tmp_path: Path) -> None:
    for file in FILES:
        path = tmp_path / "merged" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.encode())
    words = [f"{key}={tmp_path / 'merged'}", "seed_dataset=a.jsonl"]
    cfg = load_config(SelfDistillConfig, None, words)
    before = weights_digest(cfg)
    assert before is not None
    assert weights_digest(cfg) == before
    (tmp_path / "merged" / name).write_bytes(b"trained again")
    assert weights_digest(cfg) != before


def test_the_weights_of_a_server_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"trained")
    words = [f"base_model={tmp_path}", "seed_dataset=a.jsonl", "server_url=http://localhost:1/v1"]
    assert weights_digest(load_config(SelfDistillConfig, None, words)) is None
