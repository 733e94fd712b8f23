"""Write benchmarks/results/qwen_coder.json from finished evaluations of coders on HumanEval.

    python benchmarks/coder_page.py "AMD EPYC, compiled" Medusa-1=RUN/eval/humaneval ...

A report whose draft has prompt lookup beside the heads gives three rows: lookup alone, the heads
alone, and both. Options add:

- `--trees DRAFT=RUN ...` tokens per step by the number of nodes, simulated along the traces that the
  runs keep, of trees of any depth. (tree.json has the fastest tree of each size, which is shallower
  where each level costs a pass of the draft.)
- `--counted DRAFT=DIRECTORY ...` tokens per step on the bench with another tree, of other reports.
- `--exact DRAFT=DIRECTORY ...` equal answers in float32, of other reports.
- `--held-out "DRAFT, TEXT=RUN@STEP" ...` what training printed at the validation of a step, after so
  much text.
- `--served DRAFT=DIRECTORY ...` the rows of served_drafts.json, of served.py.

Then `page.py qwen_coder` draws the picture and `tables.py` writes the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.checkpoint.run_directory import TREE_TRACES
from medusa_train.tree_search.fit import cross_validate
from medusa_train.tree_search.kept_traces import load_traces

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (4, 8, 16, 63)
Json = dict[str, Any]
#: Of `overall`, what the page needs.
KEPT = (
    "acceleration_rate",
    "overhead",
    "tokens_per_s",
    "baseline_tokens_per_s",
    "speedup",
    "intervals",
    "answers",
    "equal_answers_bf16",
    "looping_answers",
    "speedup_without_loops",
    "scores",
    "chain_rates",
)


def runs_of(report: Json, draft: str, place: str) -> list[Json]:
    """Return the rows of a report: its draft, before it what was measured of the draft's parts."""
    overall = report["overall"]
    baselines = overall["baselines"]
    parts = []
    if "lookup_alone" in baselines:
        parts.append(("prompt lookup", _part(overall, "lookup_alone")))
        parts.append((draft, _part(overall, "heads_alone")))
        draft = f"{draft} + lookup"
    parts.append((draft, {key: overall[key] for key in KEPT}))
    common = {
        "place": place,
        "date": report["meta"]["date"][:10],
        "tree_nodes": report["meta"]["tree_nodes"],
        "command": report["meta"]["command"],
    }
    return [{"draft": name, **common, "overall": figures} for name, figures in parts]


def _part(overall: Json, name: str) -> Json:
    """Return the figures of a decoder that was measured beside the reported one, unscored."""
    measured = overall["baselines"][name]
    return {
        "acceleration_rate": measured["tokens_per_step"],
        "tokens_per_s": measured["tokens_per_s"],
        "baseline_tokens_per_s": overall["baseline_tokens_per_s"],
        "speedup": measured["over_plain"],
        "intervals": {"speedup": measured["over_plain_interval"]},
        "answers": overall["answers"],
        "equal_answers_bf16": measured["equal_to_plain"],
        "scores": None,
    }


def _read(entries: Sequence[str], name: str) -> Iterator[tuple[str, Json]]:
    """Yield the draft of each `DRAFT=DIRECTORY`, and what the file `name` there holds."""
    for entry in entries:
        draft, directory = entry.split("=", 1)
        yield draft, json.loads((Path(directory) / name).read_text(encoding="utf-8"))


def rates_by_nodes(run: Path) -> list[Json]:
    """Return the tokens per step of the best tree of each of `SIZES`, on conversations that it was
    not fitted to.
    """
    path = run / TREE_TRACES
    with np.load(path) as arrays:
        key = json.loads(str(arrays["key"]))
    traced = load_traces(path, key)
    assert traced is not None
    rates = cross_validate(traced.conversations, SIZES)
    return [{"nodes": nodes, "tokens_per_step": round(rates[nodes], 4)} for nodes in SIZES]


def held_out(entry: str) -> Json:
    """Return top-1 per head and tokens per step at a validation, for `DRAFT, TEXT=RUN@STEP`.

    Raises ValueError if the run has no validation at that step.
    """
    name, run = entry.split("=", 1)
    draft, text = name.split(", ", 1)
    directory, step = run.rsplit("@", 1)
    for line in (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "eval" and record["step"] == int(step):
            top1 = record["head_top1"]
            rate = record["acceptance_length"]
            return {"draft": draft, "text": text, "top1": top1, "tokens_per_step": rate}
    raise ValueError(f"{directory} has no validation at step {step}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", help="machine, and whether decoding was compiled")
    parser.add_argument("reports", nargs="+", metavar="DRAFT=DIRECTORY")
    parser.add_argument("--trees", nargs="*", default=[], metavar="DRAFT=RUN")
    parser.add_argument("--counted", nargs="*", default=[], metavar="DRAFT=DIRECTORY")
    parser.add_argument("--exact", nargs="*", default=[], metavar="DRAFT=DIRECTORY")
    parser.add_argument("--served", nargs="*", default=[], metavar="DRAFT=DIRECTORY")
    parser.add_argument("--held-out", nargs="*", default=[], metavar="DRAFT, TEXT=RUN@STEP")
    arguments = parser.parse_args()
    runs: list[Json] = []
    for draft, report in _read(arguments.reports, "report.json"):
        runs += runs_of(report, draft, arguments.place)
    nodes = {}
    for entry in arguments.trees:
        draft, run = entry.split("=", 1)
        nodes[draft] = rates_by_nodes(Path(run))
    counted = {}
    for draft, report in _read(arguments.counted, "report.json"):
        counted[draft] = {
            "nodes": report["meta"]["tree_nodes"],
            "tokens_per_step": report["overall"]["acceleration_rate"],
            "interval": report["overall"]["intervals"]["acceleration_rate"],
            "answers": report["overall"]["answers"],
        }
    exact = {}
    for draft, report in _read(arguments.exact, "report.json"):
        overall = report["overall"]
        exact[draft] = {"equal": overall["equal_answers"], "answers": overall["answers"]}
    served = []
    for draft, measured in _read(arguments.served, "served_drafts.json"):
        served += [{"draft": draft, **row} for row in measured["rows"]]
    title = "Qwen2.5-Coder 0.5B on HumanEval: speedup over compiled plain decoding"
    values = {
        run["draft"]: [run["overall"]["speedup"], *run["overall"]["intervals"]["speedup"]]
        for run in runs
    }
    chart = {"title": title, "unit": "x", "reference": 1.0, "values": values}
    content = {
        "chart": chart,
        "model": "Qwen2.5-Coder 0.5B",
        "bench": "HumanEval",
        "runs": runs,
        "nodes": nodes,
        "counted": counted,
        "float32": exact,
        "served": served,
        "held_out": [held_out(entry) for entry in arguments.held_out],
    }
    path = RESULTS / "qwen_coder.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
