import json
from pathlib import Path

import pytest
import yaml

from medusa_train.checkpoint.subject import locate
from medusa_train.evaluation.joint import joint_quality
from medusa_train.models.adapter import Adapter, LoraSpec
from medusa_train.models.backbone import Backbone
from tests.evaluation.tiny_model import write_run


@pytest.fixture
def joint_run(tmp_path: Path, backbone_dir: Path) -> Path:
    """A run with an adapter that changes its backbone, and the data that it learnt."""
    run = write_run(tmp_path / "run", backbone_dir)
    backbone = Backbone.load(str(backbone_dir))
    adapter = Adapter.attach(backbone, LoraSpec(r=4, alpha=8, dropout=0.0))
    for parameter in adapter.parameters():
        parameter.data.normal_(0, 0.05)
    adapter.save(run / "adapter")
    chat = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Well met, friend."}]}
    data = tmp_path / "chats.jsonl"
    lines = [json.dumps({"messages": [*chat["messages"], {"role": "user", "content": str(n)}]}) for n in range(6)]
    data.write_text("\n".join(lines), encoding="utf-8")
    config = {"base_model": str(backbone_dir), "datasets": [{"path": str(data), "type": "messages"}], "adapter": "lora"}
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "val_set_size": 0.5}), encoding="utf-8")
    return run


def test_a_joint_run_s_backbone_is_compared_with_the_untouched_one(joint_run: Path) -> None:
    found = joint_quality(locate(str(joint_run), None, None))
    assert found is not None
    assert found["kl"] > 1e-4
    assert found["perplexity_after"] != found["perplexity_before"]
    assert found["tokens"] > 0


def test_a_run_that_left_its_backbone_alone_has_nothing_to_compare(run_dir: Path) -> None:
    assert joint_quality(locate(str(run_dir), None, None)) is None


def test_without_its_data_nothing_is_measured(joint_run: Path) -> None:
    config = yaml.safe_load((joint_run / "config.yaml").read_text(encoding="utf-8"))
    config["datasets"][0]["path"] = "absent.jsonl"
    (joint_run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert joint_quality(locate(str(joint_run), None, None)) is None
