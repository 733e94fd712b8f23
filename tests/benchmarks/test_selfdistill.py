"""The bench of self-distillation: counts of a whole run, and its table."""

from __future__ import annotations

import json
from pathlib import Path

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
    ]
    for mode in record["modes"]:
        assert (mode["answers"], mode["tokens"]) == (8, 48)
        assert mode["rate"] > 0
    alone, batched, _ = record["modes"]
    assert (alone["passes"], alone["rows_per_pass"]) == (8 * 5, 1.0)  # the first token of an answer takes no pass
    assert (batched["passes"], batched["rows_per_pass"]) == (4 * 5, 2.0)
    assert record["machine"]["torch"]
    assert (tmp_path / "out" / "selfdistill.md").read_text().count("\n| ") == 5
