import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medusa_train.cli.evaluate import app
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import EvalConfig
from medusa_train.models.precision import emulates
from tests.evaluation.tiny_model import write_bench, write_run, write_target_model

runner = CliRunner()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target model, one run under runs/ and a bench file."""
    home = tmp_path_factory.mktemp("workplace")
    write_run(home / "runs" / "first", write_target_model(home / "backbone"))
    write_bench(home / "small.jsonl")
    return home


def test_without_a_model_the_newest_run_is_evaluated(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    flags = ["--bench", "small.jsonl", "--max-new-tokens", "8", "--limit", "2"]
    result = runner.invoke(app, [*flags, "dtype=float32", "warmup=0"])
    assert result.exit_code == 0, result.output
    first = result.output.splitlines()[0]
    assert "runs/first (the newest run)" in first
    assert "small: 2 questions" in first
    report = json.loads(
        (workplace / "runs" / "first" / "eval" / "small" / "report.json").read_text()
    )
    assert report["overall"]["answers"] == 4
    assert report["overall"]["equal_answers"] + report["overall"]["tie_answers"] == 4
    assert (report["overall"]["equal_answers_bf16"] is not None) is not emulates(
        torch.device("cpu"), torch.bfloat16
    )
    assert report["meta"]["model"] == "runs/first"
    assert report["meta"]["base_model"] == "backbone"


def test_flags_override_the_yaml(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    (workplace / "eval.yaml").write_text(
        "bench: absent\nbase_model: backbone\ndtype: float32\nmax_new_tokens: 4\nwarmup:"
        " 0\noutput_dir: out\n"
    )
    result = runner.invoke(app, ["eval.yaml", "--bench", "small.jsonl", "limit=1"])
    assert result.exit_code == 0, result.output
    assert "alone, no heads" in result.output.splitlines()[0]
    report = json.loads((workplace / "out" / "report.json").read_text())
    assert report["overall"]["speedup"] is None
    assert (report["meta"]["questions"], report["meta"]["max_new_tokens"]) == (1, 4)


def test_torn_weights_end_with_a_message(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    shutil.copytree(workplace / "backbone", workplace / "torn")
    (workplace / "torn" / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    result = runner.invoke(
        app, ["--bench", "small.jsonl", "--base-model", "torn", "--dtype", "float32"]
    )
    assert result.exit_code == 1
    message = " ".join(result.stderr.split())
    assert "error: base_model" in message
    assert "model.safetensors: incomplete or damaged" in message
    assert "Traceback" not in result.output


def test_compare(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    flags = [
        "--base-model",
        "backbone",
        "--bench",
        "small.jsonl",
        "--max-new-tokens",
        "4",
        "--limit",
        "1",
    ]
    for name in ("one", "two [/x]"):
        result = runner.invoke(
            app, [*flags, "--output-dir", name, "--dtype", "float32", "warmup=0"]
        )
        assert result.exit_code == 0, result.output
    result = runner.invoke(app, ["--compare", "one", "two [/x]", "--output-dir", "both"])
    assert result.exit_code == 0, result.output
    assert "loops" in result.output
    assert "<h1>Comparison of runs</h1>" in (workplace / "both" / "compare.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--compare", "--calibrate"], 2, "give one of them"),
        (["--compare", "--print-config", "a", "b"], 2, "give one of them"),
        (["--interactive", "--calibrate"], 2, "give one of them"),
        (["--compare", "only-one"], 2, "two runs or more"),
        (["--compare", "a", "b", "--limit", "3"], 2, "--compare does not read --limit"),
        (
            ["--interactive", "--bench", "tiny", "--batch-size", "2"],
            2,
            "read --bench, --batch-size",
        ),
        (["--bench", "small.jsonl", "bnch=x"], 2, "did you mean bench"),
        (["--bench", "no-such-bench"], 1, "no benchmark of that name (tiny, tools, mtbench,"),
        (["--bench", "small.jsonl"], 1, "make demo"),
        (["--bench", "small.jsonl", "--model", "absent"], 1, "no such directory"),
        (
            ["--bench", "small.jsonl", "--base-model", "m", "--output-dir", "small.jsonl/x"],
            2,
            "is a file, not a directory",
        ),
        (["--bench", "small.jsonl", "--judge-model", "alone"], 2, "belong together"),
        (
            ["--bench", "small.jsonl", "assistant_model=./absent"],
            1,
            "assistant_model ./absent: no such directory",
        ),
    ],
)
def test_mistakes_end_with_a_message_and_their_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("medusa_train.config.paths.PROJECT_ROOT", tmp_path)
    write_bench(tmp_path / "small.jsonl")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    result = runner.invoke(app, arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_the_page_to_open_stands_alone_in_its_line(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    words = ["--bench", "small.jsonl", "--limit", "1", "--max-new-tokens", "4", "dtype=float32"]
    result = runner.invoke(app, [*words, "warmup=0", "--output-dir", "out"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    number = lines.index("report: out/report.html")
    assert lines[number + 1].startswith("next to it: report.json, report.md, answers.jsonl")
    assert "model_answer/first.jsonl" in lines[number + 1]
    assert "Overhead: time of a step with the tree divided by time of a plain step." in lines
    page = (workplace / "out" / "report.html").read_text(encoding="utf-8")
    assert "overhead: time of a step with the tree divided by time of a plain step." in page


def test_print_config_shows_every_value_and_runs_nothing() -> None:
    example = str(PROJECT_ROOT / "configs/examples/evaluate.yaml")
    result = runner.invoke(app, [example, "--print-config", "--model", "runs/mine", "limit=3"])
    assert result.exit_code == 0, result.output
    lines = {line.split(":")[0]: line for line in result.stdout.splitlines()}
    assert set(lines) == set(EvalConfig.model_fields)
    assert lines["limit"].split() == ["limit:", "3", "#", "override", "'limit=3'"]
    assert lines["model"].startswith("model: runs/mine ")
    assert lines["batch_size"].endswith("evaluate.yaml:14")
