"""Tables and a plot of what `drafts.py` found: a pure function of its results. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drafts_compare import CHAIN, EQUAL, OWN, WHOLE, between, lines
from machine import sentence, table

Found = Mapping[str, Any]

#: Speedups over plain decoding with Vicuna-7B: MT-Bench (Amphista, table 1; Medusa, table 1; alpha: section A.2.3),
#: Spec-Bench (Kangaroo, table 1).
PUBLISHED = {
    "medusa1": "1.87x MT, 1.41x SB",
    "medusa2": "2.83x MT",
    "hydra++": "2.37x MT",
    "amphista": "2.44x MT",
    "amphista-alpha": "2.63x MT",
    "kangaroo": "1.50x SB",
}
WINDOWS = (1, 2, 3, 4)
NOTES = """\
*speedup*: tokens per second over those of the faster plain decoding, this project's loop with the empty tree or
`generate` of transformers, prefill included; *overhead*: latency of a step over that of a plain step of the loop.
Both are of one run in which all decoders took turns on every prompt. *Tokens per step* and *CTAR(w)*, the share of
steps that accepted w guesses or more, are counts of a second run in float32 with weights as they lie in the files:
with a given tree no clock has a say in them. *own*: the tree that the run calibrated, which is sized by measured
latency; *equal*: one of as many nodes for all, fitted to what the runs held out and always filled; *chain*: first
guesses alone, for Kangaroo as published, ending early behind a doubtful one; *whole chain*: never ending early (eta 0),
as CTAR is defined. Intervals: 95 %, bootstrap over questions. *Equal answers*: of plain decoding's in float32,
token for token, + those that part where two logits tie; Medusa-2's against its own backbone's. *Training tokens/s*: the
median over windows of ten steps."""


def write_report(out: Path, found: Found) -> None:
    """Write drafts.json, .md and, where matplotlib is installed, .png into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    said = [line._asdict() for line in lines(found)]
    (out / "drafts.json").write_text(json.dumps({**found, "lines": said}, indent=1) + "\n", encoding="utf-8")
    (out / "drafts.md").write_text(markdown(found), encoding="utf-8")
    with suppress(ImportError):
        from drafts_plot import plot

        plot(out / "drafts.png", found)


def markdown(found: Found) -> str:
    """The whole page, as far as it can be told by now."""
    parts = ["# Drafts side by side", sentence(dict(found["machine"]))]
    if found["quick"]:
        parts.append("**Made with --quick: nothing is trained. It shows that everything runs, and no more.**")
    if said := [str(line) for line in lines(found)]:
        parts += ["## What has to be shown", "\n".join(said)]
    parts += ["## What was trained", training_table(found)]
    if found["together"] > 1:
        parts.append(f"Trained {found['together']} at a time, with as large a share of the threads each.")
    if found["counts"]:
        parts += ["## All benches", overview(found), NOTES.replace("\n", " ")]
    for bench, result in found["counts"].items():
        times = found["times"].get(bench)
        parts += [f"## {bench}", about(result, times), bench_table(found, bench), accuracy_title(bench)]
        parts += [accuracy_table(found, bench)]
        if len(categories := _categories(result)) > 1:
            parts += [
                f"Tokens per step and speedup by category, own trees ({bench})",
                category_table(found, bench, categories),
            ]
    return "\n\n".join(parts) + "\n"


def training_table(found: Found) -> str:
    """Size and training of every draft."""
    rows = []
    for case in found["cases"]:
        learnt = case["training"]
        rows.append(
            [
                case["title"],
                str(case["depth"]),
                f"{case['parameters']:,}",
                f"{case['parameters'] / case['backbone_parameters']:.1%}",
                " + ".join(f"{one['tokens']:,}" for one in learnt),
                f"{training_speed(learnt):,.0f}",
                PUBLISHED.get(case["name"], ""),
            ]
        )
    titles = ["draft", "depth", "extra parameters", "of the backbone's", "tokens trained on", "training tokens/s"]
    return table([*titles, "papers, 7B"], rows)


def training_speed(learnt: Sequence[Found]) -> float:
    """Tokens per second over all stages, each at its median speed."""
    return sum(one["tokens"] for one in learnt) / sum(one["tokens"] / one["tokens_per_s"] for one in learnt)


def overview(found: Found) -> str:
    """One row per draft, its own tree (Kangaroo's chain too), all benches beside each other."""
    titles = ["draft", "extra parameters", "training tokens/s"]
    for bench in found["counts"]:
        titles += [f"{bench}: tokens per step", "overhead", "speedup"]
    rows = [["plain decoding", "0", "", *(["1.00", "1.00", "1.00x"] * len(found["counts"]))]]
    for case in found["cases"]:
        rate = training_speed(case["training"])
        for tree in (OWN, CHAIN) if case["kind"] == "kangaroo" else (OWN,):
            row = [f"{case['title']}{', chain' if tree == CHAIN else ''}", f"{case['parameters']:,}", f"{rate:,.0f}"]
            for bench, result in found["counts"].items():
                counted = result["drafts"].get(case["name"], {}).get("trees", {}).get(tree)
                row += _figures(counted, _timed(found, bench, case["name"], tree))
            rows.append(row)
    return table(titles, rows)


def _figures(counted: Found | None, timed: Found | None) -> list[str]:
    return [
        "-" if counted is None else number(counted["acceleration_rate"]),
        "-" if timed is None else number(timed["overhead"]),
        "-" if timed is None else number(timed["speedup_over_fastest"], "x"),
    ]


def number(value: float | None, suffix: str = "") -> str:
    """Two digits, or that it was not measured."""
    return "-" if value is None else f"{value:.2f}{suffix}"


def _timed(found: Found, bench: str, name: str, tree: str) -> Found | None:
    times = found["times"].get(bench)
    return None if times is None else times["drafts"].get(name, {}).get(tree)


def about(counts: Found, times: Found | None) -> str:
    """Questions, dtype and plain speeds."""
    skipped = f", {counts['skipped']} turns too long for the model" if counts["skipped"] else ""
    limit = counts["settings"]["max_new_tokens"]
    said = f"{counts['questions']} questions, {counts['answers']} answers of up to {limit} tokens{skipped}."
    if times is None:
        return f"{said} Not timed yet."
    plain, stock = times["tokens_per_s"]["plain"], times["tokens_per_s"]["generate"]
    return (
        f"{said} Timed in {times['dtype']}: plain decoding {plain:.1f} tokens/s, `generate` {stock:.1f} tokens/s. "
        f"{sentence(dict(times['machine']))}"
    )


def bench_table(found: Found, bench: str) -> str:
    """A row per draft and tree."""
    rows = [list(row) for tree in (OWN, EQUAL, CHAIN, WHOLE) for row in _rows(found, bench, tree)]
    windows = [f"CTAR({window})" for window in WINDOWS]
    titles = ["draft", "tree", "nodes", "tokens per step", "overhead", "speedup", "tokens/s", *windows]
    return table([*titles, "equal answers"], rows, words=2)


def _rows(found: Found, bench: str, tree: str) -> Iterator[list[str]]:
    result = found["counts"][bench]
    for case in found["cases"]:
        if (draft := result["drafts"].get(case["name"])) is None:
            continue
        if (counted := draft["trees"].get(tree)) is None:
            continue
        timed = _timed(found, bench, case["name"], tree)
        shares = counted["ctar"]
        ties = f"+{counted['ties']}" if counted["ties"] else ""
        yield [
            case["title"],
            tree,
            str(counted["nodes"]),
            _with(counted["acceleration_rate"], counted["acceleration_interval"]),
            "-" if timed is None else _with(timed["overhead"], timed["intervals"]["overhead"]),
            "-"
            if timed is None
            else _with(timed["speedup_over_fastest"], timed["intervals"]["speedup_over_fastest"], "x"),
            "-" if timed is None else f"{timed['tokens_per_s']:.1f}",
            *(f"{shares[w - 1]:.3f}" if w <= len(shares) else "0.000" for w in WINDOWS),
            f"{counted['equal']}{ties}/{result['answers']}",
        ]


def _timed_cell(timed: Found | None, name: str, suffix: str = "") -> str:
    return "-" if timed is None else _with(timed[name], timed["intervals"][name], suffix)


def _with(value: float | None, found: Sequence[float] | None, suffix: str = "") -> str:
    return f"{number(value, suffix)} {between(found, '.2f')}" if found is not None else number(value, suffix)


def accuracy_title(bench: str) -> str:
    """What stands above `accuracy_table`."""
    return f"How often the first guess is right at each depth, along the backbone's own greedy answers ({bench})"


def accuracy_table(found: Found, bench: str) -> str:
    """Top-1 accuracy of every head."""
    drafts = found["counts"][bench]["drafts"]
    rows, deepest = [], 0
    for case in found["cases"]:
        if case["name"] in drafts:
            shares = accuracies(drafts[case["name"]])
            deepest = max(deepest, len(shares))
            rows.append([case["title"], *(f"{share:.3f}" for share in shares)])
    rows = [row + [""] * (deepest + 1 - len(row)) for row in rows]
    return table(["draft", *(str(depth) for depth in range(1, deepest + 1))], rows)


def accuracies(draft: Found) -> list[float]:
    """Top-1 accuracy by depth, over all questions."""
    sums = [[sum(part) for part in zip(*depth, strict=True)] for depth in zip(*draft["hits"].values(), strict=True)]
    return [hits / max(known, 1) for hits, known in sums]


def _categories(result: Found) -> list[str]:
    return list(next(iter(result["drafts"].values()))["trees"][OWN]["categories"])


def category_table(found: Found, bench: str, categories: Sequence[str]) -> str:
    """A row per category, a column per draft."""
    drafts = found["counts"][bench]["drafts"]
    shown = [case for case in found["cases"] if case["name"] in drafts]
    rows = []
    for category in categories:
        row = [category]
        for case in shown:
            rate = drafts[case["name"]]["trees"][OWN]["categories"].get(category)
            timed = _timed(found, bench, case["name"], OWN)
            speed = None if timed is None else timed["categories"].get(category)
            row.append(f"{number(rate)}, {number(speed, 'x')}")
        rows.append(row)
    return table(["category", *(case["title"] for case in shown)], rows)
