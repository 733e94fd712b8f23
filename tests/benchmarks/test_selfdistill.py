"""The bench of self-distillation: counts of a whole run, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import selfdistill

from tests.evaluation.tiny_model import write_backbone, write_run


def test_one_command_writes_the_table_and_the_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_backbone(tmp_path / "backbone"))
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("".join(json.dumps({"turns": [f"question {n}", "more?"]}) + "\n" for n in range(6)))
    flags = ["--seed-dataset", str(seeds), "--seeds", "4", "--batch", "2", "--dtypes", "float32", "--rounds", "1"]
    assert selfdistill.main([str(run), *flags, "--max-new-tokens", "6", "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "selfdistill.json").read_text())
    assert [mode["name"] for mode in record["modes"]] == [
        "one at a time",
        "batch of 2",
        "one at a time, heads speculate",
        "batch of 2, heads speculate",
        "whole batches of 2, heads speculate",
    ]
    for mode in record["modes"]:
        assert (mode["answers"], mode["tokens"]) == (8, 48)
        assert mode["rate"] > 0
    alone, batched, _, refilled, whole = record["modes"]
    assert (alone["passes"], alone["rows_per_pass"]) == (8 * 5, 1.0)  # the first token of an answer takes no pass
    assert (batched["passes"], batched["rows_per_pass"]) == (4 * 5, 2.0)
    assert 1 < refilled["rows_per_pass"] <= 2
    assert refilled["passes"] <= whole["passes"]
    assert record["machine"]["torch"]
    assert (tmp_path / "out" / "selfdistill.md").read_text().count("\n| ") == 7


def test_forced_tokens_are_counted_beside_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_backbone(tmp_path / "backbone")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"turns": [f"question {n}", "more?"]}) + "\n" for n in range(6)))
    calls: list[tuple[int, bool]] = []

    def rate(paths: object, prompts: list, tokens: int, batch: int, compiled: bool) -> tuple:
        calls.append((batch, compiled))
        return own_rate(paths, prompts, tokens, batch, False)  # type: ignore[arg-type]

    own_rate = selfdistill.own_rate
    monkeypatch.setattr(selfdistill, "own_rate", rate)
    flags = [
        str(model),
        "--forced",
        "5",
        "--batches",
        "1",
        "4",
        "--compile",
        "--questions",
        str(questions),
        "--out",
        str(tmp_path),
    ]
    assert selfdistill.main(flags) == 0
    assert "vLLM is left out" in capsys.readouterr().out
    fake = "import json, sys; n = len(json.load(open(sys.argv[2]))); print('RESULT', [2.0, n * int(sys.argv[3])])"
    monkeypatch.setattr(selfdistill, "VLLM_SCRIPT", fake)
    assert selfdistill.main([*flags, "--prompts", "4", "--vllm", sys.executable]) == 0
    assert calls == 2 * [(1, False), (1, True), (4, False), (4, True)]
    record = json.loads((tmp_path / "selfdistill_forced.json").read_text())
    assert record["prompts"] == 4
    assert record["rates"]["vLLM"] == {"1": 10.0, "4": 10.0}
    assert all(rate > 0 for by_batch in record["rates"].values() for rate in by_batch.values())
    assert "| vLLM | 10 | 10 |" in (tmp_path / "selfdistill_forced.md").read_text()
    monkeypatch.setattr(selfdistill, "VLLM_SCRIPT", "raise SystemExit('no such device')")
    with pytest.raises(RuntimeError, match="no such device"):
        selfdistill.main([*flags, "--vllm", sys.executable])
