"""`medusa-export` as typed: files, config, warnings, messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from medusa_train.checkpoint.layouts import save_heads
from medusa_train.cli.export import app, joint_warnings
from medusa_train.models.drafts.medusa import MedusaDraft

D, V = 8, 21
FILES = ["config.json", "medusa_lm_head.pt", "medusa_lm_head.safetensors"]


def make_run(directory: Path, num_heads: int = 5, num_layers: int = 1, *, bias: bool = False) -> Path:
    backbone = directory.parent / "backbone"
    backbone.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"base_model: {backbone}\n")
    torch.manual_seed(0)
    draft = MedusaDraft(D, V, num_heads, num_layers, bias=bias)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_()
    save_heads(draft, directory / "heads", str(backbone))
    return directory


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("to", ["reference", "tgi"])
def test_a_run_becomes_a_directory_for_others(tmp_path: Path, to: str) -> None:
    run = make_run(tmp_path / "run")
    code, output = call(str(run), "--to", to)
    assert code == 0, output
    target = run / "export" / to
    assert str(target) in output
    assert "warning" not in output
    assert sorted(p.name for p in target.iterdir()) == FILES
    config = json.loads((target / "config.json").read_text())
    assert config == {
        "medusa_num_heads": 5,
        "medusa_num_layers": 1,
        "base_model_name_or_path": str(tmp_path / "backbone"),
    }
    wanted = load_file(run / "heads" / "medusa_lm_head.safetensors")
    for found in (
        load_file(target / "medusa_lm_head.safetensors"),
        torch.load(target / "medusa_lm_head.pt", weights_only=True),
    ):
        assert sorted(found) == sorted(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_keys_may_stand_for_flags(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, output = call(f"run={run}", "to=tgi", f"output_dir={tmp_path / 'out'}")
    assert code == 0, output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES


def test_a_directory_of_heads_will_do(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "heads").rename(tmp_path / "alone")
    code, output = call(str(tmp_path / "alone"), "--output-dir", str(tmp_path / "out"))
    assert code == 0, output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES


@pytest.mark.parametrize(
    ("to", "num_heads", "num_layers", "bias", "words"),
    [
        ("reference", 5, 2, False, ["distinct blocks"]),
        ("tgi", 5, 2, False, []),
        ("reference", 3, 1, False, ["always builds 5 heads"]),
        ("tgi", 3, 1, False, []),
        ("tgi", 5, 1, True, ["have a bias"]),
        ("reference", 2, 2, True, ["distinct blocks", "always builds 5 heads", "have a bias"]),
    ],
)
def test_what_the_reader_will_not_do_is_said(
    tmp_path: Path, to: str, num_heads: int, num_layers: int, bias: bool, words: list[str]
) -> None:
    run = make_run(tmp_path / "run", num_heads, num_layers, bias=bias)
    code, output = call(str(run), "--to", to)
    assert code == 0, output
    assert output.count("warning:") == len(words)
    for word in words:
        assert word in output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere/at-all"], 1, "nowhere/at-all"),
        (["--to", "nonsense", "x"], 2, "nonsense"),
        (["tto=tgi"], 2, "tto"),
    ],
)
def test_mistakes_are_messages(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    found, output = call(*arguments)
    assert found == code
    assert words in output
    assert "Traceback" not in output


def test_a_damaged_heads_file_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = run / "heads" / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    code, output = call(str(run))
    assert code == 1
    assert path.name in output
    assert not (run / "export").exists()


def test_what_a_joint_run_trained_of_the_backbone_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    (line,) = joint_warnings(tmp_path, ["adapter"])
    assert str(tmp_path / "adapter") in line
    assert "heads alone" in line
    assert joint_warnings(tmp_path, []) == []
