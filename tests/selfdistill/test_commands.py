from pathlib import Path
from types import SimpleNamespace

import pytest

from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.errors import ConfigError
from medusa_train.selfdistill import commands


def test_a_jointly_trained_target_model_is_exported_before_heads_are_trained_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = SimpleNamespace(
        adapter=Path("my run/adapter"), home=Path("my run"), target_model="base"
    )
    monkeypatch.setattr(commands, "resolve_model_paths", lambda cfg: paths)
    cfg = load_config(SelfDistillConfig, None, ["base_model=my run", "seed_dataset=x.jsonl"])
    assert commands.next_command(cfg, Path("a.jsonl")) == (
        "medusa-export 'my run' --to merged && medusa-train configs/any_m1.yaml 'base_model=my"
        " run/export/merged' 'datasets=[{path: a.jsonl, type: messages}]'"
    )


def test_on_a_server_the_model_is_the_one_that_was_named() -> None:
    words = ["base_model=org/model", "server_url=http://h/v1", "trust_remote_code=true"]
    cfg = load_config(SelfDistillConfig, None, words)
    assert commands.next_command(cfg, Path("a [1].jsonl")) == (
        "medusa-train configs/any_eagle3.yaml base_model=org/model"
        """ 'datasets=[{path: "a [1].jsonl", type: messages}]' trust_remote_code=true"""
    )


def test_answers_of_the_embedded_model_train_its_heads() -> None:
    cfg = load_config(SelfDistillConfig, None, ["base_model=data/tiny", "seed_dataset=tiny"])
    command = commands.next_command(cfg, Path("a.jsonl"))
    assert command.startswith("medusa-train configs/tiny_m1.yaml base_model=")


def test_the_template_of_a_data_set_comes_before_that_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        "base_model: m\nchat_template: chatml\n"
        "datasets: [{path: a.jsonl, conversation: zephyr}, {path: b.jsonl}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        commands.refuse_training_config(path)
    first, second = str(caught.value).splitlines()[1:]
    assert "--prompts a.jsonl --model m --chat-template zephyr " in first
    assert "--prompts b.jsonl --model m --chat-template chatml " in second
