"""Commands whose output goes to a file say what they wait for, where it takes more than seconds."""

import re

import pytest
from typer.testing import CliRunner

from medusa_train.cli import evaluate, export, selfdistill
from tests.cli.test_export import make_run
from tests.evaluation.tiny_model import write_run, write_target_model
from tests.slow import slow_down

LOADING = "medusa_train.checkpoint.load_model.load_target_model"
DISTILL = ["--prompts", "mine.jsonl", "--model", "backbone", "dtype=float32", "max_new_tokens=4"]


@pytest.mark.parametrize(
    ("app", "words", "place", "said"),
    [
        (selfdistill.app, [*DISTILL, "drop_truncated=false"], LOADING, "loading the model"),
        (
            evaluate.app,
            ["--interactive", "--dtype", "float32", "--model", "run"],
            LOADING,
            "loading the model",
        ),
        (
            evaluate.app,
            ["--calibrate", "--bench", "bench.jsonl", "--dtype", "float32", "--model", "run"],
            LOADING,
            "loading in float32",
        ),
        (
            export.app,
            ["exported", "--to", "tgi"],
            "medusa_train.export.write.write_medusa_heads",
            "exporting to tgi",
        ),
    ],
    ids=["selfdistill", "chat", "calibrate", "export"],
)
def test_a_command_names_what_it_waits_for(app, words, place, said, tmp_path, monkeypatch):
    target_model = write_target_model(tmp_path / "backbone")
    write_run(tmp_path / "run", target_model)
    make_run(tmp_path / "exported")
    (tmp_path / "mine.jsonl").write_text('{"id": "a", "turns": ["Hi?"]}\n')
    (tmp_path / "bench.jsonl").write_text('{"question_id": 1, "turns": ["Hi?"]}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("medusa_train.progress.SILENT_SECONDS", 0.2)
    slow_down(monkeypatch, place)
    result = CliRunner().invoke(app, words, input="/exit\n")
    assert re.search(rf"^{said}: 0 s so far$", result.output, re.MULTILINE), result.output
    if "--interactive" in words:  # stdout has only the chat
        assert said in result.stderr
    assert "Traceback" not in result.output
