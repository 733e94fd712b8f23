"""`--print-config`: every value, its origin, and YAML that says the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_train.cli.train import app
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.config.show import show_config

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
    shown = lines(show_config(cfg))
    assert list(shown) == list(TrainConfig.model_fields)
    assert shown["base_model"] == ("some/model", f"{config_file}:1")
    assert shown["learning_rate"] == ("0.001", f"{config_file}:6")
    assert shown["seed"] == ("7", "override 'seed=7'")
    assert shown["output_dir"] == ("runs/y", "--output-dir")
    assert shown["medusa_num_heads"] == ("5", "default")
    assert shown["recipe"] == ("medusa1", "follows from other keys")
    assert shown["chat_template"] == ("zephyr", "follows from other keys")
    assert shown["lora_r"] == ("8", f"{config_file}:7, no effect here")
    assert shown["max_steps"] == ("null", "default")
    assert shown["datasets"] == (
        "[{path: b.jsonl, type: sharegpt, conversation: zephyr}]",
        f"{config_file}:2, override 'datasets.0.path=b.jsonl'",
    )


def test_what_is_shown_can_be_read_again_and_says_the_same(config_file: Path, tmp_path: Path) -> None:
    cfg = load_config(TrainConfig, config_file, ["warmup_ratio=0.1", "deepspeed={zero_optimization: {stage: 2}}"])
    again = tmp_path / "again.yaml"
    again.write_text(show_config(cfg))
    assert load_config(TrainConfig, again).model_dump() == cfg.model_dump()


def test_the_command_exits_0_and_loads_nothing(config_file: Path) -> None:
    code = (
        "import sys\n"
        "from medusa_train.cli.train import main\n"
        f"sys.argv = ['medusa-train', {str(config_file)!r}, '--print-config']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    print('exit', end.code or 0)\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["exit", "0", "False"] or done.stdout.split()[-1] == "False"
    assert "base_model: some/model" in done.stdout


def test_mistakes_are_still_mistakes(config_file: Path) -> None:
    config_file.write_text(YAML + "lora_rr: 8\n")
    result = CliRunner().invoke(app, [str(config_file), "--print-config"])
    assert result.exit_code == 2
    assert "did you mean lora_r?" in result.output
