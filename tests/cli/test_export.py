"""`medusa-export` as typed: files, config, warnings, messages."""

import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.cli.export import app, export_after_training
from medusa_train.config.types import ExportTarget
from medusa_train.export.publish import Export
from medusa_train.models.drafts.medusa import MedusaDraft

D, V = 8, 21
FILES = ["README.md", "config.json", "medusa_lm_head.pt", "medusa_lm_head.safetensors"]


def make_run(
    directory: Path, num_heads: int = 5, num_layers: int = 1, *, bias: bool = False
) -> Path:
    target_model = directory.parent / "backbone"
    target_model.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"base_model: {target_model}\n")
    torch.manual_seed(0)
    draft = MedusaDraft(D, V, num_heads, num_layers, bias=bias)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_()
    save_draft(draft, directory / "heads", str(target_model))
    return directory


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_run_becomes_a_directory_for_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lr=1e-3")
    code, output = call(str(run), "--to", "tgi")
    assert code == 0, output
    target = run / "export" / "tgi"
    assert str(target) in output
    assert "warning" not in output
    assert sorted(p.name for p in target.iterdir()) == FILES
    assert json.loads((target / "config.json").read_text()) == {
        "medusa_num_heads": 5,
        "medusa_num_layers": 1,
        "base_model_name_or_path": str(tmp_path / "backbone"),
    }


def test_a_target_model_that_has_moved_is_named_by_base_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "backbone").rename(tmp_path / "moved")
    code, output = call(str(run), "--to", "merged", f"base_model={tmp_path / 'moved'}")
    assert (code, "so there is nothing to merge" in output) == (1, True)
    assert str(tmp_path / "moved") in output.replace("\n", "")


def test_keys_may_stand_for_flags(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, output = call(f"run={run}", "to=tgi", f"output_dir={tmp_path / 'out'}")
    assert code == 0, output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES


def test_a_training_configuration_asks_for_several(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    console = Console(file=io.StringIO(), width=300)
    export_after_training(str(run), ["vllm", "tgi"], console)
    assert sorted(p.name for p in (run / "export").iterdir()) == ["tgi", "vllm"]
    assert str(run / "export" / "tgi") in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_merged_model_comes_before_the_heads_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def export_run(paths: ModelPaths, to: ExportTarget, **settings: object) -> Export:
        made.append(to)
        return Export(paths, tmp_path, to, tmp_path / to, "owner/name")

    monkeypatch.setattr("medusa_train.export.write.export_run", export_run)
    run = make_run(tmp_path / "run")
    export_after_training(str(run), ["vllm", "merged", "tgi"], Console(file=io.StringIO()))
    assert made == ["merged", "vllm", "tgi"]


def test_a_failed_upload_is_reported_after_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_train.export.upload.hub_is_unreachable", lambda: True)
    run = make_run(tmp_path / "run")
    code, output = call(str(run), "--to", "tgi", "--push-to-hub", "me/heads")
    assert code == 1
    assert "can't be reached" in output
    assert "set base_model=OWNER/NAME" in output
    assert (run / "export" / "tgi" / "README.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere/at-all"], 1, "nowhere/at-all"),
        (["--to", "nonsense", "x"], 2, "nonsense"),
        (["tto=tgi"], 2, "tto"),
        (["runs/a", "to=tgi", "runs/b"], 2, "expected one run, got runs/a and runs/b"),
    ],
)
def test_wrong_arguments_give_messages(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    found, output = call(*arguments)
    assert found == code
    assert words in output
    assert "Traceback" not in output


def test_an_upload_is_as_private_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push = Mock(return_value="url")
    monkeypatch.setattr("medusa_train.export.upload.push", push)
    run = make_run(tmp_path / "run")
    for words, private in ((), True), (("private=false",), False):
        code, output = call(
            str(run), "--to", "vllm", "--push-to-hub", "me/eagle-heads", "license=mit", *words
        )
        assert (code, push.call_args.args[1]) == (0, "me/eagle-heads"), output
        assert push.call_args.kwargs == {"private": private}
        assert "as eagle, whatever the method" in " ".join(output.split())
    assert "license: mit" in (run / "export" / "vllm" / "README.md").read_text()


@pytest.mark.parametrize(
    ("to", "name", "is_warned"),
    [("vllm", "/models/mine", True), ("vllm", "owner/name", False), ("merged", "/mine", False)],
)
def test_an_upload_that_names_a_local_target_model_is_warned_of(
    to: ExportTarget,
    name: str,
    is_warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merged target model names no other one."""

    def export_run(paths: ModelPaths, to: ExportTarget, **settings: object) -> Export:
        return Export(paths, tmp_path, to, tmp_path / to, name)

    monkeypatch.setattr("medusa_train.export.write.export_run", export_run)
    monkeypatch.setattr("medusa_train.export.upload.push", Mock(return_value="url"))
    run = make_run(tmp_path / "run")
    code, output = call(str(run), "--to", to, "--push-to-hub", "me/heads")
    assert code == 0, output
    assert (f"by a local path, {name}: set base_model=OWNER/NAME" in output) is is_warned
