"""benchmarks/coder_page.py: the rows of a report with heads, lookup, and both."""

from __future__ import annotations

import json
from pathlib import Path

import coder_page
import pytest

from medusa_train.checkpoint.run_directory import TREE_TRACES
from medusa_train.tree_search.fit import Trace
from medusa_train.tree_search.kept_traces import save_traces
from medusa_train.tree_search.traces import TracedAnswers


def test_a_report_of_heads_and_lookup_gives_a_row_for_each_and_for_both() -> None:
    measured = {
        "tokens_per_s": 30.0,
        "tokens_per_step": 1.6,
        "over_plain": 1.5,
        "over_plain_interval": [1.4, 1.6],
        "equal_to_plain": 9,
    }
    overall = {
        **dict.fromkeys(coder_page.KEPT),
        "answers": 10,
        "baseline_tokens_per_s": 20.0,
        "tokens_per_s": 44.0,
        "speedup": 2.2,
        "baselines": {"heads_alone": measured, "lookup_alone": {**measured, "over_plain": 1.9}},
    }
    meta = {"date": "2026-11-28T03:26:52+00:00", "tree_nodes": 3, "command": "medusa-eval"}
    runs = coder_page.runs_of({"overall": overall, "meta": meta}, "Medusa-1", "EPYC, compiled")
    speedups = {run["draft"]: run["overall"]["speedup"] for run in runs}
    assert speedups == {"prompt lookup": 1.9, "Medusa-1": 1.5, "Medusa-1 + lookup": 2.2}
    assert all(run["overall"]["baseline_tokens_per_s"] == 20.0 for run in runs)
    assert all(run["date"] == "2026-11-28" for run in runs)

    del overall["baselines"]["heads_alone"], overall["baselines"]["lookup_alone"]
    (alone,) = coder_page.runs_of({"overall": overall, "meta": meta}, "Hydra++", "EPYC, compiled")
    assert alone["draft"] == "Hydra++"


def test_a_validation_is_found_by_its_step(tmp_path: Path) -> None:
    records = [
        {"kind": "train", "step": 8, "loss": 1.0},
        {"kind": "eval", "step": 4, "head_top1": [0.2], "acceptance_length": 1.2},
        {"kind": "eval", "step": 8, "head_top1": [0.4], "acceptance_length": 1.5},
    ]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    found = coder_page.held_out(f"Medusa-1, 0.43M, twice={tmp_path}@8")
    assert found == {
        "draft": "Medusa-1",
        "text": "0.43M, twice",
        "top1": [0.4],
        "tokens_per_step": 1.5,
    }
    with pytest.raises(ValueError, match="no validation at step 5"):
        coder_page.held_out(f"Medusa-1, 0.43M={tmp_path}@5")


def test_tokens_per_step_are_of_trees_of_any_depth(tmp_path: Path) -> None:
    """Of a draft that is always right the deepest chain is best: five tokens for each step."""
    trace = Trace([[0, 0, 0, 0]] * 101, [4] * 101)
    save_traces(tmp_path / TREE_TRACES, TracedAnswers([[trace]] * 3, [1]), {})
    rates = coder_page.rates_by_nodes(tmp_path)
    assert rates[0] == {"nodes": 4, "tokens_per_step": 5.0}
