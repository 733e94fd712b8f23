"""The JSON Schema takes what the command takes and refuses what it refuses, as far as a schema can
tell.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medusa_train.cli.train import app
from medusa_train.config.docs import (
    REFERENCE,
    SCHEMA,
    format_config,
    json_schema,
    replace_reference,
)
from medusa_train.config.load import load_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import IGNORED_AXOLOTL_KEYS, EvalConfig, TrainConfig
from medusa_train.config.yaml_source import read_yaml_file

SHIPPED = sorted((PROJECT_ROOT / "configs").glob("*.yaml"))
GOOD: dict[str, Any] = {"base_model": "m", "datasets": [{"path": "a"}]}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(TrainConfig)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_carry_the_editor_line_and_known_keys(
    schema: dict[str, Any], path: Path
) -> None:
    first = path.read_text().splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert path.parent / name == PROJECT_ROOT / SCHEMA
    assert (
        set(schema["required"])
        <= set(read_yaml_file(path, path.name).values)
        <= set(schema["properties"])
    )


def test_the_shipped_schema_is_the_one_that_is_printed() -> None:
    result = CliRunner().invoke(app, ["--schema"])
    assert result.exit_code == 0
    assert result.stdout == (PROJECT_ROOT / SCHEMA).read_text(), (
        "run `python -m medusa_train.config.docs`"
    )


def test_the_key_reference_is_generated_from_the_schema() -> None:
    text = (PROJECT_ROOT / REFERENCE).read_text(encoding="utf-8")
    assert replace_reference(text) == text, "run `python -m medusa_train.config.docs`"


def test_every_key_shows_its_meaning(schema: dict[str, Any]) -> None:
    keys = schema["properties"]
    assert set(keys) == {*TrainConfig.model_fields, *IGNORED_AXOLOTL_KEYS}
    assert all(entry["description"] for entry in keys.values())
    heads = keys["medusa_num_heads"]  # an empty key means its default
    assert (heads["default"], heads["anyOf"]) == (
        5,
        [{"type": "integer", "minimum": 1, "maximum": 32}, {"type": "null"}],
    )
    assert keys["learning_rate"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0}
    one = {"$ref": "#/$defs/DatasetConfig"}  # a list, or its only item
    assert keys["datasets"]["anyOf"] == [one, {"type": "array", "items": one, "minItems": 1}]
    assert (
        schema["$defs"]["DatasetConfig"]["additionalProperties"]
        is schema["additionalProperties"]
        is False
    )
    assert keys["adapter"]["anyOf"] == [
        {"enum": ["lora", "qlora"], "type": "string"},
        {"type": "null"},
    ]
    assert json_schema(EvalConfig).get("required") is None
    assert "title" not in json.dumps(keys)


YAML = """base_model: some/model
datasets:
  - path: a.jsonl
    type: sharegpt
    conversation: zephyr
learning_rate: 1e-3
lora_r: 8
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(YAML)
    return path


def lines(text: str) -> dict[str, tuple[str, str]]:
    """Value and origin of each key."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+): (.*?) +# (.*)", line)
        assert match, line
        found[match[1]] = (match[2], match[3])
    return found


def test_every_key_shows_its_value_and_its_origin(config_file: Path) -> None:
    cfg = load_config(
        TrainConfig,
        config_file,
        ["seed=7", "datasets.0.path=b.jsonl"],
        flags={"output_dir": "runs/y"},
    )
    shown = lines(format_config(cfg))
    assert list(shown) == list(TrainConfig.model_fields)
    assert shown["base_model"] == ("some/model", f"{config_file}:1")
    assert shown["learning_rate"] == ("0.001", f"{config_file}:6")
    assert shown["seed"] == ("7", "override 'seed=7'")
    assert shown["output_dir"] == ("runs/y", "--output-dir")
    assert shown["medusa_num_heads"] == ("5", "default")
    assert shown["recipe"] == ("medusa1", "derived")
    assert shown["chat_template"] == ("zephyr", "derived")
    assert shown["lora_r"] == ("8", f"{config_file}:7, no effect")
    assert shown["lora_alpha"] == ("16", "default, no effect")
    assert shown["max_steps"] == ("null", "default")
    assert shown["datasets"] == (
        "[{path: b.jsonl, type: sharegpt, conversation: zephyr}]",
        f"{config_file}:2, override 'datasets.0.path=b.jsonl'",
    )


def test_what_is_shown_can_be_read_again_and_says_the_same(
    config_file: Path, tmp_path: Path
) -> None:
    cfg = load_config(
        TrainConfig, config_file, ["warmup_ratio=0.1", "deepspeed={zero_optimization: {stage: 2}}"]
    )
    again = tmp_path / "again.yaml"
    again.write_text(format_config(cfg))
    assert load_config(TrainConfig, again).model_dump() == cfg.model_dump()
