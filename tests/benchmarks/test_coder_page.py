"""benchmarks/coder_page.py: the rows of a report with heads, lookup, and both."""

from __future__ import annotations

import coder_page


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
