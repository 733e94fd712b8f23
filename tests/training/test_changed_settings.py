"""What is listed as changed between the run in a directory and a configuration that resumes it."""

from pathlib import Path

import pytest

from medusa_train.checkpoint.run_directory import write_config
from medusa_train.config.schema import TrainConfig
from medusa_train.training.resume import ResumePlan, config_of, plan_resume
from medusa_train.training.resume import changed_weight_keys as changed_since


def config(**keys: object) -> TrainConfig:
    return TrainConfig(
        **{"base_model": "m", "datasets": [{"path": "d.jsonl"}], "output_dir": "out", **keys}
    )


def changed_weight_keys(now: TrainConfig, run: Path) -> list[str]:
    before = config_of(run)
    assert before is not None
    return changed_since(now, before)


def resumed(run: Path) -> ResumePlan:
    (run / "checkpoints" / "step-1").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints" / "step-1" / "manifest.json").touch()
    return plan_resume(config(output_dir=str(run), resume_from_checkpoint="latest"), None)


def test_only_keys_behind_the_weights_are_listed(tmp_path: Path) -> None:
    write_config(config(medusa_num_heads=3, optimizer="adamw_torch"), tmp_path)
    now = config(medusa_num_heads=2, optimizer="adamw_bnb_8bit", learning_rate=0.5)
    assert sorted(changed_weight_keys(now, tmp_path)) == [
        "medusa_num_heads: was 3, now 2",
        'optimizer: was "adamw_torch", now "adamw_bnb_8bit"',
    ]


def test_a_key_that_was_off_or_not_set_is_listed(tmp_path: Path) -> None:
    write_config(config(), tmp_path)
    now = config(medusa_vocab_size=100, load_in_8bit=True)
    assert sorted(changed_weight_keys(now, tmp_path)) == [
        "load_in_8bit: was false, now true",
        "medusa_vocab_size: was null, now 100",
    ]


def test_the_same_target_model_by_another_path_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    write_config(config(base_model="model"), tmp_path)
    assert changed_weight_keys(config(base_model="./model"), tmp_path) == []
    assert changed_weight_keys(config(base_model="other"), tmp_path) == [
        f'base_model: was "{tmp_path / "model"}", now "other"'
    ]


def test_a_run_without_config_yaml_has_no_changes_that_are_known(tmp_path: Path) -> None:
    plan = resumed(tmp_path)
    assert not plan.changed
    assert "whether settings changed since" in str(plan.note)
