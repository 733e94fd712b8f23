"""Write the report of measured servers: tables for the terminal and served.md, served.json,
served.html, answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from medusa_train.evaluation.questions import WITH_CALLS, WITHOUT_CALLS
from medusa_train.evaluation.report_page import meta_rows
from medusa_train.inference.decoding_mode import describe_mode, mode_of
from medusa_train.pages.charts import Bar, bars
from medusa_train.pages.page import (
    Figure,
    PageSection,
    Table,
    markdown_page,
    number,
    render_page,
    write_files,
)
from medusa_train.server_bench.blocks import PLAIN
from medusa_train.server_bench.metrics import Cell

Json = Mapping[str, Any]

HOW = [
    "tokens/s: tokens of all answers over the time in which at least one was under way.",
    (
        "over plain: tokens/s over those of the server without heads on the same questions,"
        " measured next to it; in brackets its 95 % interval over blocks (Student's t). The row of"
        " plain is its fastest measurement."
    ),
    "first token, per token: medians over the answers, in milliseconds.",
    (
        "tokens per step, accepted: from vLLM's counters at /metrics, of steps that verify a draft;"
        " accepted is the share of drafts whose token at position 1, 2, ... was accepted. With"
        " calls, without calls: tokens per step of answers of chats with tools that make tool"
        " calls, and of the others."
    ),
    (
        "equal: greedy answers whose text equals that of the server without heads; turns after a"
        " differing answer are not compared."
    ),
]


ADVICE = (
    "A setting is recommended only where the whole interval is above 1. A server has one setting"
    " for all its requests: choose by the concurrency of your traffic. These results hold for this"
    " machine, model and benchmark."
)


def write_report(report: Json, cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Write served.json, served.md, served.html and answers.jsonl to `directory`; return their
    paths.
    """
    answers = []
    for metrics, blocks in cells:
        place = {name: metrics[name] for name in ("server", "session", "concurrency")}
        answers += [{**place, **asdict(one)} for block in blocks for one in block.answers]
    title = title_of(report)
    sections = sections_of(report)
    meta = report["meta"]
    subtitle = (
        f"{meta['turns']}; questions: {meta['questions']}, at most {meta['max_new_tokens']} new"
        f" tokens per answer; {meta['date']}"
    )
    contents = {
        "served.json": report,
        "served.md": markdown_page(title, sections),
        "served.html": render_page(title, subtitle, sections, _tiles(report)),
        "answers.jsonl": answers,
    }
    return write_files(directory, contents)


def title_of(report: Json) -> str:
    """Return benchmark, model, draft and decoding mode as a title."""
    meta = report["meta"]
    draft = f" with {method}" if (method := (meta.get("draft") or {}).get("method")) else ""
    return f"{meta['bench']} served: {meta['model']}{draft}, {describe_mode(mode_of(meta))}"


def rows_of(report: Json) -> list[Json]:
    """Return the rows to show. For each concurrency, the first row is the server without a draft in
    its fastest session, then the other servers follow.
    """
    draft_rows = [row for row in report["cells"] if row["server"] != PLAIN]
    return sorted([*report["plain"], *draft_rows], key=lambda row: row["concurrency"])


def metrics_table(report: Json) -> Table:
    """Return one row per concurrency and server."""
    rates = {
        (row["session"], row["concurrency"]): number(row["tokens_per_s"], 1)
        for row in report["cells"]
        if row["server"] == PLAIN
    }
    rows = []
    for row in rows_of(report):
        place = (row["session"], row["concurrency"])
        equal = ""
        if row.get("equal_answers") is not None:
            equal = f"{row['equal_answers']}/{row['compared_answers']}"
        by_category = row.get("tokens_per_step_of", {})
        rows.append(
            {
                "concurrency": str(row["concurrency"]),
                "server": row["server"],
                "tokens/s": number(row["tokens_per_s"], 1),
                "plain next to it": "" if row["server"] == PLAIN else rates.get(place, ""),
                "over plain": _ratio(row),
                "first token ms": _milliseconds(row["time_to_first_token_s"]),
                "per token ms": _milliseconds(row["time_per_token_s"]),
                "tokens per step": _rate(row["tokens_per_step"]),
                **{name: _rate(by_category.get(name)) for name in (WITH_CALLS, WITHOUT_CALLS)},
                "accepted": " ".join(f"{share:.2f}" for share in row["acceptance"] or ()),
                "equal": equal,
            }
        )
    return Table.of_rows(rows)


def _ratio(row: Json) -> str:
    if row.get("ratio") is None:
        return ""
    return number(row["ratio"], 2, "x", row["ratio_interval"])


def _rate(tokens_per_step: float | None) -> str:
    return number(tokens_per_step) if tokens_per_step else ""


def _milliseconds(distribution: Json | None) -> str:
    return "" if distribution is None else f"{1000 * distribution['median']:.1f}"


def recommendation_lines(report: Json) -> list[str]:
    """Say for each concurrency whether to serve heads, and with how many tokens. Heads are
    recommended only if they won the measurement.
    """
    advice = report["recommendation"]
    if not advice:
        return [
            "none: there is no measurement without heads to compare with (--against URL, or"
            " --serve)"
        ]
    lines = []
    for one in advice:
        tokens = one["num_speculative_tokens"]
        setting = f"num_speculative_tokens {tokens}" if tokens else "heads as they were served"
        text = f"{setting}, {_ratio(one)}"
        if not one["use"]:
            verdict = {"loses": "slower", "undecided": "not measured to be faster"}[one["verdict"]]
            text = f"off; the best, {setting}, is {verdict}: {_ratio(one)}"
        lines.append(f"concurrency {one['concurrency']}: {text}")
    return lines


def terminal_report(report: Json) -> Group:
    """Return title, table, notes and recommendation for the terminal."""
    return Group(
        Text(title_of(report), style="bold"),
        metrics_table(report),
        *(Text(f"note: {note}", style="yellow") for note in report["meta"]["notes"]),
        Text("recommendation", style="bold"),
        *(Text(f"  {line}") for line in recommendation_lines(report)),
    )


def sections_of(report: Json) -> list[PageSection]:
    """Return the sections of both pages: notes, charts and table, run, recommendation."""
    meta = {key: value for key, value in report["meta"].items() if key != "notes"}
    servers = list(dict.fromkeys(row["server"] for row in rows_of(report)))
    return [
        PageSection(lines=[f"Note: {note}" for note in report["meta"]["notes"]]),
        PageSection(
            "Speed",
            legend=servers,
            figures=_charts(report, servers),
            tables=[metrics_table(report)],
            remarks=HOW,
        ),
        PageSection("Run", facts=meta_rows(meta)),
        PageSection(
            "Recommendation",
            lines=recommendation_lines(report),
            remarks=[ADVICE] if report["recommendation"] else [],
        ),
    ]


def _tiles(report: Json) -> list[tuple[str, str]]:
    tiles = []
    for one in report["recommendation"]:
        tokens = one["num_speculative_tokens"]
        on = f"{one['ratio']:.2f}x with " + ("heads" if tokens is None else f"k = {tokens}")
        tiles.append((on if one["use"] else "off", f"concurrency {one['concurrency']}"))
    return tiles


def _charts(report: Json, servers: Sequence[str]) -> list[Figure]:
    """Draw ratios and rates of every server by concurrency, with one color per server."""
    ratios: dict[str, list[Bar]] = {}
    rates: dict[str, list[Bar]] = {}
    for row in rows_of(report):
        concurrency = str(row["concurrency"])
        color = servers.index(row["server"])
        rates.setdefault(concurrency, []).append(Bar(row["tokens_per_s"], None, color))
        if row.get("ratio") is not None:
            bar = Bar(row["ratio"], row["ratio_interval"], color)
            ratios.setdefault(concurrency, []).append(bar)
    drawn = []
    if ratios:
        drawing = bars(list(ratios.items()), "ratio", unit="x", reference=1.0)
        caption = (
            "Tokens per second with a draft over without, by concurrency. Whiskers: 95 % intervals"
            " over blocks."
        )
        drawn.append(Figure("Speed over plain", drawing, caption))
    drawing = bars(list(rates.items()), "Tokens per second", digits=0)
    caption = "Of all concurrent answers together, by concurrency."
    drawn.append(Figure("Tokens per second", drawing, caption))
    return drawn
