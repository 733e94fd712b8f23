"""Two signals at once to self-distillation and evaluation: one request, whose message is printed."""

import importlib
import json
import os
import sys
from pathlib import Path

from tests.evaluation.tiny_model import write_bench, write_run, write_target_model
from tests.training.mishap import Mishap, forks, start, terminate_twice, wait

pytestmark = forks


def run(program: str, arguments: list[str], where: Path, mishap: Mishap | None) -> None:
    os.chdir(where)
    if mishap is not None:
        mishap.arrange()
    sys.argv = [f"medusa-{program}", *arguments]
    importlib.import_module(f"medusa_train.cli.{program}").app()


def result(
    program: str, arguments: list[str], where: Path, place: str | None = None
) -> tuple[int, str]:
    """Run a command, which is signalled twice when `place` is called for the second time."""
    mishap = None if place is None else Mishap(place, 2, terminate_twice)
    code = wait(start(where / "log", run, program, arguments, where, mishap))
    return code, (where / "log").read_text()


def test_self_distillation_says_how_to_go_on(tmp_path: Path) -> None:
    write_target_model(tmp_path / "backbone")
    write_bench(tmp_path / "small.jsonl")
    words = ["--seed", "small.jsonl", "--model", "backbone", "--output", "out.jsonl"]
    words += ["--limit", "2", "--max-new-tokens", "6", "dtype=float32", "drop_truncated=false"]
    place = "medusa_train.selfdistill.local:HFEngine.next"
    code, text = result("selfdistill", words, tmp_path, place)
    assert code == 143, text
    assert text.endswith("interrupted; run the same command again to resume out.jsonl\n")
    assert result("selfdistill", words, tmp_path)[0] == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_an_evaluation_keeps_what_it_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first", write_target_model(tmp_path / "backbone"))
    write_bench(tmp_path / "small.jsonl")
    words = ["--bench", "small.jsonl", "--max-new-tokens", "6", "--limit", "2"]
    words += ["dtype=float32", "warmup=0", "exactness=false"]
    place = "medusa_train.evaluation.timing:SpeedTest._measure"
    code, text = result("evaluate", words, tmp_path, place)
    assert code == 143, text
    assert "the same command resumes" in text
    place = "medusa_train.evaluation.run_bench:write_report"
    code, text = result("evaluate", words, tmp_path, place)
    assert code == 143, text
    assert "interrupted after the timed part; its results are in runs/first/eval/small" in text
    assert "Traceback" not in text
    report = tmp_path / "runs" / "first" / "eval" / "small" / "report.json"
    assert json.loads(report.read_text())["meta"]["questions"] == 2
