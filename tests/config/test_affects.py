"""The lists that follow from what keys affect are right."""

import sys
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.docs import json_schema
from medusa_train.config.draft_sections import SECTIONS
from medusa_train.config.schema import DATA_KEYS, NOT_IN_STAGE_ONE, WEIGHT_KEYS, TrainConfig
from medusa_train.training.load_data import load_data
from tests.training.conftest import *  # noqa: F403  (a run's fixtures)


def test_the_lists_that_follow() -> None:
    assert {"load_in_4bit", "load_in_8bit", "recipe", "lora_r", "optimizer"} <= set(WEIGHT_KEYS)
    assert not set(WEIGHT_KEYS) & {"learning_rate", "logging_steps", "output_dir", "bf16"}
    assert {"seed", "val_set_size", "test_datasets"} <= set(NOT_IN_STAGE_ONE)
    assert {"base_model", "draft", "medusa_num_heads", *SECTIONS} <= set(NOT_IN_STAGE_ONE)
    assert not set(NOT_IN_STAGE_ONE) & {"learning_rate", "datasets", "load_in_4bit", "recipe"}
    settings = SECTIONS["eagle3"]().settings
    assert "decay_coefficient" not in settings
    assert "train_steps" in settings


def test_a_schema_does_not_show_it() -> None:
    assert "affects" not in str(json_schema(TrainConfig)).lower()


#: Read by the loading of data, too: where it is kept, how fast it is read, how rows are laid out.
PLACES = {"dataset_prepared_path", "dataset_processes", "micro_batch_size", "cache_hidden_states"}


def test_what_the_loading_of_data_reads_are_keys_of_data(
    make_config: Any, console: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    original = TrainConfig.__getattribute__

    def noted(self: TrainConfig, name: str) -> Any:
        file = Path(sys._getframe(1).f_code.co_filename)
        if name in TrainConfig.model_fields and (
            file.name == "load_data.py" or file.parent.name == "data"
        ):
            read.add(name)
        return original(self, name)

    cfg = make_config()
    monkeypatch.setattr(TrainConfig, "__getattribute__", noted)
    load_data(cfg, console)
    assert "datasets" in read
    assert read - set(DATA_KEYS) <= PLACES
