"""What DeepSpeed is given: the key read and completed, and its compiler."""

import os

import pytest

from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.training.deepspeed_checks import check_deepspeed
from medusa_train.training.deepspeed_engine_config import (
    check_compiler,
    complete_config,
    loading_config,
)


def config(**keys):
    values = {
        "base_model": "m",
        "datasets": [{"path": "d"}],
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    return TrainConfig(**{**values, **keys})


def test_zero_3_loads_weights_in_their_dtype():
    cfg = config(deepspeed={"zero_optimization": {"stage": 3}})
    complete = complete_config(cfg, 2, hidden_size=1)
    assert complete.items() >= {"train_batch_size": 16}.items()
    assert loading_config(cfg, 2, "bfloat16") == {**complete, "bf16": {"enabled": True}}
    assert loading_config(cfg, 2, "float32") == complete
    assert loading_config(cfg, 1, "float32") is None
    assert (
        loading_config(config(deepspeed={"zero_optimization": {"stage": 2}}), 2, "float32") is None
    )


def test_a_name_twice_in_the_file_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"steps_per_print": 1, "steps_per_print": 2}')
    with pytest.raises(ConfigError, match=r"steps_per_print. stands twice"):
        check_deepspeed(config(deepspeed=str(tmp_path / "a.json")), 1)


def test_files_that_can_not_be_used_are_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "deep.json").write_text('{"a":' * 5000)
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 4}}')
    for name, words in {
        "absent.json": "no such file",
        "a.json": "JSON",
        "b.json": "stage: 4",
        "deep.json": "nested too deeply",
    }.items():
        with pytest.raises(ConfigError, match=words):
            check_deepspeed(config(deepspeed=str(tmp_path / name)), 1)


def test_without_a_compiler_or_ninja_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))  # no ninja beside it
    with pytest.raises(MedusaError, match=r"C\+\+ compiler \(c\+\+\) and ninja") as caught:
        check_compiler(False, {"PATH": str(tmp_path)})
    assert "build-essential" in str(caught.value)
    for name in ("g++-12", "ninja"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        os.chmod(tmp_path / name, 0o755)
    check_compiler(False, {"PATH": str(tmp_path), "CXX": "g++-12"})
    check_compiler(True, {"PATH": ""})  # nccl needs none
