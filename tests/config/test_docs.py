"""The JSON Schema takes what the command takes and refuses what it refuses, as far as a schema can tell."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medusa_train.cli.common import split_arguments
from medusa_train.cli.train import app
from medusa_train.config.docs import REFERENCE, SCHEMA, format_config, json_schema, replace_reference
from medusa_train.config.load import load_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import IGNORED_AXOLOTL_KEYS, EvalConfig, ExportConfig, SelfDistillConfig, TrainConfig
from medusa_train.config.yaml_lines import read_yaml_file

SHIPPED = sorted((PROJECT_ROOT / "configs").glob("*.yaml"))
GOOD: dict[str, Any] = {"base_model": "m", "datasets": [{"path": "a"}]}


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any] | None = None) -> bool:
    """The part of JSON Schema that ours uses."""
    root = root or schema
    unknown = set(schema) - {
        "$schema", "title", "description", "default", "definitions", "type", "properties", "required", "items",
        "additionalProperties", "anyOf", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "minItems", "pattern", "$ref",
    }  # fmt: skip
    assert not unknown, unknown
    if "$ref" in schema:
        return accepts(root["definitions"][schema["$ref"].removeprefix("#/definitions/")], value, root)
    if "anyOf" in schema and not any(accepts(form, value, root) for form in schema["anyOf"]):
        return False
    if "type" in schema and not _is_of(schema["type"], value):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        if not set(schema.get("required", [])) <= set(value):
            return False
        if schema.get("additionalProperties") is False and not set(value) <= set(known):
            return False
        return all(accepts(known[name], item, root) for name, item in value.items() if name in known)
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(
            accepts(schema.get("items", {}), item, root) for item in value
        )
    if isinstance(value, str) and "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    return _within(schema, value) if isinstance(value, (int, float)) and not isinstance(value, bool) else True


def _is_of(names: str | list[str], value: Any) -> bool:
    kinds = {"null": type(None), "boolean": bool, "string": str, "object": dict, "array": list}
    wanted = [names] if isinstance(names, str) else names
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = number and float(value).is_integer()
    return any(
        (name == "number" and number) or (name == "integer" and whole) or isinstance(value, kinds.get(name, ()))
        for name in wanted
    )


def _within(schema: dict[str, Any], value: float) -> bool:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
    return low <= value <= high and above < value < below


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(TrainConfig, "x")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_carry_the_editor_line_and_fit(schema: dict[str, Any], path) -> None:  # type: ignore[no-untyped-def]
    first = path.read_text().splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert path.parent / name == PROJECT_ROOT / SCHEMA
    assert accepts(schema, read_yaml_file(path, path.name).values)


def test_the_shipped_schema_is_the_one_that_is_printed() -> None:
    result = CliRunner().invoke(app, ["--schema"])
    assert result.exit_code == 0
    assert result.stdout == (PROJECT_ROOT / SCHEMA).read_text(), "run `python -m medusa_train.config.docs`"


def test_the_key_reference_is_generated_from_the_schema() -> None:
    text = (PROJECT_ROOT / REFERENCE).read_text(encoding="utf-8")
    assert replace_reference(text) == text, "run `python -m medusa_train.config.docs`"


def test_the_commands_of_the_configuration_page_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_ROOT)
    text = (PROJECT_ROOT / REFERENCE).read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    classes = {"medusa-train": TrainConfig, "medusa-eval": EvalConfig}
    for command, *words in map(shlex.split, block.splitlines()):
        path, overrides = split_arguments(word for word in words if "=" in word or word.endswith(".yaml"))
        load_config(classes[command], path, overrides)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"learning_rate": 1e-3, "bf16": "auto", "eval_steps": 0.1, "save_steps": 40},
        {"bf16": True, "resume_from_checkpoint": True, "lora_target_modules": "q_proj", "export": "vllm"},
        {"resume_from_checkpoint": "runs/x", "lora_target_modules": ["q_proj"], "export": ["vllm", "merged"]},
        {"deepspeed": {"zero": 1}, "special_tokens": {"bos_token": "<s>"}, "medusa_scheduler": "sine_0.5"},
        {"deepspeed": None, "adapter": None, "wandb_watch": None, "fsdp_config": {"odd": [1]}, "wandb_run_id": 7},
        {"datasets": [{"path": "a", "type": "sharegpt", "conversation": None, "weight": 2}]},
    ],
)
def test_what_the_command_takes_the_schema_takes(schema: dict[str, Any], keys: dict[str, Any]) -> None:
    assert accepts(schema, {**GOOD, **keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"learning_rte": 1},
        {"learning_rate": "fast"},
        {"learning_rate": 0},
        {"micro_batch_size": 1.5},
        {"adapter": "dora"},
        {"medusa_scheduler": "sine_2"},
        {"export": ["ggml"]},
        {"base_model": None},
        {"datasets": []},
        {"datasets": [{"pth": "a"}]},
        {"datasets": [{"path": None}]},
        {"val_set_size": 1},
        {"warmup_ratio": 1},
        {"datasets": [{"path": "a", "weight": 0}]},
    ],
)
def test_what_the_command_refuses_the_schema_refuses(schema: dict[str, Any], keys: dict[str, Any]) -> None:
    assert accepts(schema, GOOD)
    assert not accepts(schema, {**GOOD, **keys})


def test_every_key_shows_its_meaning(schema: dict[str, Any]) -> None:
    keys = schema["properties"]
    assert set(keys) == {*TrainConfig.model_fields, *IGNORED_AXOLOTL_KEYS}
    assert all(entry["description"] for entry in keys.values())
    assert keys["medusa_num_heads"]["default"] == 5
    assert "title" not in json.dumps(keys)


@pytest.mark.parametrize("cls", [EvalConfig, SelfDistillConfig, ExportConfig])
def test_the_other_commands_have_schemas_too(cls) -> None:  # type: ignore[no-untyped-def]
    made = json_schema(cls, "x")
    assert accepts(made, {})
    assert not accepts(made, {"no_such_key": 1})


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
    cfg = load_config(TrainConfig, config_file, ["seed=7", "datasets.0.path=b.jsonl"], flags={"output_dir": "runs/y"})
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
    assert shown["max_steps"] == ("null", "default")
    assert shown["datasets"] == (
        "[{path: b.jsonl, type: sharegpt, conversation: zephyr}]",
        f"{config_file}:2, override 'datasets.0.path=b.jsonl'",
    )


def test_what_is_shown_can_be_read_again_and_says_the_same(config_file: Path, tmp_path: Path) -> None:
    cfg = load_config(TrainConfig, config_file, ["warmup_ratio=0.1", "deepspeed={zero_optimization: {stage: 2}}"])
    again = tmp_path / "again.yaml"
    again.write_text(format_config(cfg))
    assert load_config(TrainConfig, again).model_dump() == cfg.model_dump()


def test_mistakes_are_still_mistakes(config_file: Path) -> None:
    config_file.write_text(YAML + "lora_rr: 8\n")
    result = CliRunner().invoke(app, [str(config_file), "--print-config"])
    assert result.exit_code == 2
    assert "did you mean lora_r?" in result.output
