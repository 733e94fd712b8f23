"""The bench of servers puts our acceptance beside vLLM's, of reports as medusa-eval writes them."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import served

WEIGHTS = "0123456789abcdef"
#: Ranks of two heads along answers of five and four tokens; -1: not known, or not among the best.
RANKS = {
    1: [[0, 0], [0, 3], [5, 0], [0, -1], [-1, -1]],
    2: [[0, 0], [0, 0], [0, -1], [-1, -1]],
}


def write_report(directory: Path, *, dtype: str = "float32", weights: str = WEIGHTS) -> None:
    """Write what the script reads of an evaluation here."""
    directory.mkdir(parents=True)
    meta = {"max_new_tokens": 8, "dtype": dtype, "weights": weights}
    report = {"meta": {**meta, "decoding": {"acceptance": "greedy"}}}
    (directory / "report.json").write_text(json.dumps(report))
    lines = [json.dumps({"question_id": key, "ranks": ranks}) for key, ranks in RANKS.items()]
    (directory / "ranks.jsonl").write_text("\n".join(lines) + "\n")


def write_served(directory: Path) -> None:
    """Write what the script reads of a measurement of servers."""
    figures: dict[str, Any] = dict.fromkeys(served.COPIED, 1)
    figures |= {"session": "plain and k=2", "num_speculative_tokens": 2}
    figures |= {"ratio": 1.25, "ratio_interval": [1.1, 1.4], "acceptance": [0.5, 0.25]}
    plain = {"server": "plain", "session": "plain and k=2", "concurrency": 1, "tokens_per_s": 20.0}
    meta = {"server": "vllm 0", "arguments": [], "draft": {"method": "medusa"}, "weights": WEIGHTS}
    directory.mkdir(parents=True)
    cells = [plain, {"server": "k=2", **figures}]
    (directory / "served.json").write_text(json.dumps({"meta": meta, "cells": cells}))


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    path = tmp_path / "two" / "question.jsonl"
    path.parent.mkdir()
    lines = [json.dumps({"question_id": key, "turns": ["?"]}) for key in RANKS]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("fault", ["none", "absent", "dtype", "weights"])
def test_our_acceptance_is_of_the_same_draft_questions_and_dtype(
    tmp_path: Path, bench: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run = tmp_path / "run"
    if fault != "absent":
        other = {"dtype": {"dtype": "bfloat16"}, "weights": {"weights": "other"}}
        write_report(run / "eval" / "two", **other.get(fault, {}))
    asked: list[tuple[str, ...]] = []

    def evaluate(run: Path, options: argparse.Namespace, directory: Path, *words: str) -> None:
        asked.append(words)
        if "--serve" in words:
            write_served(directory)
        else:
            write_report(directory)

    monkeypatch.setattr(served, "evaluate", evaluate)
    words = [str(run), "--bench", str(bench), "--dtype", "float32", "--max-new-tokens", "8"]
    assert served.main([*words, "--tokens", "2", "--out", str(tmp_path / "out")]) == 0
    is_answered_here = ["--tree" in words for words in asked]
    assert is_answered_here == [False] if fault == "none" else [False, True]
    assert "serve_speculative_tokens=[2]" in asked[0]

    # The steps start at tokens 0 and 3 of the first answer, and at 0 of the second.
    (row,) = json.loads((tmp_path / "out" / "served_drafts.json").read_text())["rows"]
    assert row["own_acceptance"] == [1.0, 0.6667]
    assert row["own_tokens_per_step"] == 2.6667
    assert row["plain_tokens_per_s"] == 20.0
    page = (tmp_path / "out" / "served_drafts.md").read_text()
    assert "| run | 1 | 2 | 20.0 | 1.0 | 1.25x [1.10, 1.40] | 0.50 0.25 | 1.00 0.67 |" in page


def test_a_failed_evaluation_ends_the_script_with_its_status(tmp_path: Path, bench: Path) -> None:
    words = ["--bench", str(bench), "--out", str(tmp_path), "--dtype", "int3"]
    with pytest.raises(SystemExit) as ended:
        served.main([str(tmp_path / "none"), *words])
    assert ended.value.code == 2
