"""The page of `draft_vocab.py`: a row per vocabulary, with intervals over questions. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from m2_vs_m1 import keep
from machine import facts, sentence, table

from medusa_train.errors import DataError
from medusa_train.evaluation.bootstrap import Counts, compare_rates, interval, resample

FULL = "full"
TITLES = (
    "tokens",
    "of the training text",
    "of held-out text",
    "of the bench's answers",
    "heads, MB",
    "propose, ms",
    "tokens per step, equal tree",
    "less than full",
    "own tree, nodes",
    "tokens per step, own tree",
    "less than full, own trees",
)


def write_report(
    out: Path, results: Mapping[str, Mapping[str, Any]], dtype: str, script: str, arguments: Sequence[str] | None
) -> None:
    """Write draft_vocab.json and draft_vocab.md to `out`."""
    machine = facts(script, arguments)
    rows = {size: summary(size, results) for size in results}
    keep(out / "draft_vocab.json", {"machine": machine, "dtype": dtype, "sizes": json.loads(json.dumps(rows))})
    (out / "draft_vocab.md").write_text(markdown(rows, machine, dtype), encoding="utf-8")


def summary(size: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one vocabulary, intervals at 95 %, and the differences to the full one's on the same questions."""
    result = results[size]
    found: dict[str, Any] = {
        key: result.get(key) for key in ("coverage_train", "coverage_held_out", "bytes", "propose_ms")
    }
    found["coverage_bench"] = result["own"]["coverage"]
    for which in ("equal", "own"):
        if which not in result:
            continue
        answers = _counts(result[which])
        found[which] = {"nodes": result[which]["nodes"], **_rate(answers)}
        if size != FULL and which in results.get(FULL, {}):
            found[which] |= _difference(_counts(results[FULL][which]), answers)
    return found


def _counts(measured: Mapping[str, Any]) -> dict[str, Counts]:
    return {name: Counts(*pair) for name, pair in measured["answers"].items()}


def _rate(answers: Mapping[str, Counts]) -> dict[str, Any]:
    rows = torch.tensor([count for count in answers.values() if count.steps], dtype=torch.float64)
    tokens, steps = resample(rows).unbind(dim=1)
    whole = rows.sum(dim=0)
    return {"rate": float(whole[0] / whole[1]), "interval": interval(tokens / steps)}


def _difference(full: Mapping[str, Counts], reduced: Mapping[str, Counts]) -> dict[str, Any]:
    try:
        found = compare_rates(full, reduced)
    except DataError:
        return {}
    return {"difference": found.difference, "difference_interval": found.difference_interval, "ratio": found.ratio}


def markdown(rows: Mapping[str, Mapping[str, Any]], machine: Mapping[str, Any], dtype: str) -> str:
    """The page."""
    cells = [_cells(size, row) for size, row in rows.items()]
    return (
        "\n\n".join(
            [
                "# Heads over a reduced draft vocabulary",
                sentence(dict(machine)),
                table(TITLES, cells),
                "Steps are counted in greedy float32 decoding, whose text the vocabulary cannot change. *equal tree*: "
                "one tree for all, that of the full vocabulary's last checkpoint; *own tree*: the one that each run "
                "chose by measured latency. In brackets 95 % bootstrap intervals, questions drawn whole and, for "
                f"differences, in pairs. *propose*: median of calls in turns, {dtype}, laid out as for decoding.",
            ]
        )
        + "\n"
    )


def _cells(size: str, row: Mapping[str, Any]) -> list[str]:
    shares = [f"{row[key]:.2%}" for key in ("coverage_train", "coverage_held_out", "coverage_bench")]
    equal, own = row.get("equal", {}), row["own"]
    return [
        size,
        *shares,
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['propose_ms']:.3f}",
        _with_interval(equal, "rate", "interval"),
        _with_interval(equal, "difference", "difference_interval", sign=-1.0),
        str(own["nodes"]),
        _with_interval(own, "rate", "interval"),
        _with_interval(own, "difference", "difference_interval", sign=-1.0),
    ]


def _with_interval(found: Mapping[str, Any], key: str, around: str, sign: float = 1.0) -> str:
    if key not in found:
        return "-"
    ends = "" if found[around] is None else " [{:.3f}, {:.3f}]".format(*sorted(sign * end for end in found[around]))
    return f"{sign * found[key]:.3f}{ends}"
