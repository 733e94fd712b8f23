"""Write the report of measured servers: tables for the terminal and served.md, served.json, served.html, answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from medusa_train.evaluation.decoding_mode import describe_settings, settings_of
from medusa_train.evaluation.html_report.charts import PALETTE, Bar, Curve, bars, curves
from medusa_train.evaluation.html_report.layout import cards, document, figure, figures_table, percent
from medusa_train.evaluation.html_report.page import meta_rows, meta_table
from medusa_train.io import replace_text
from medusa_train.server_bench.figures import Cell

Json = Mapping[str, Any]

HOW = [
    "tokens/s: tokens of all answers over the time in which at least one was under way.",
    "over plain: tokens/s over those of the server without heads on the same questions; in brackets its 95 % bootstrap "
    "interval over questions.",
    "first token, per token: medians over the answers, in milliseconds.",
    "tokens per step, accepted: from vLLM's counters at /metrics; accepted is the share of drafts whose token at "
    "position 1, 2, ... was accepted.",
    "equal: greedy answers whose text equals that of the server without heads; turns after a differing answer are not "
    "compared.",
]


def write_report(report: Json, cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Write served.json, served.md, served.html and answers.jsonl to `directory`; returns their paths."""
    answers = [
        {"server": cell.server, "session": cell.session, "concurrency": cell.concurrency, **asdict(answer)}
        for cell in cells
        for answer in cell.answers.values()
    ]
    contents = {
        "served.json": json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        "served.md": markdown(report),
        "served.html": html_page(report),
        "answers.jsonl": "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers),
    }
    for name, content in contents.items():
        replace_text(directory / name, content)
    return [directory / name for name in contents]


def title_of(report: Json) -> str:
    """Return bench, model and mode as a title."""
    meta = report["meta"]
    return f"{meta['bench']} served: {meta['model']}, {describe_settings(settings_of(meta))}"


def rows_of(report: Json) -> list[Json]:
    """Return the figures to show: by concurrency the server without heads, all sessions together, then the others."""
    others = [figures for figures in report["cells"] if figures["server"] != "plain"]
    return sorted([*report["plain"], *others], key=lambda figures: figures["concurrency"])


def table_rows(report: Json) -> tuple[list[str], list[list[str]]]:
    """Return titles, and one row of cells per concurrency and server. Columns without any value are left out."""
    rows = rows_of(report)
    columns = {
        "concurrency": [str(row["concurrency"]) for row in rows],
        "server": [row["server"] for row in rows],
        "tokens/s": [f"{row['tokens_per_s']:.1f}" for row in rows],
        "over plain": [_ratio(row) for row in rows],
        "first token ms": [_milliseconds(row["time_to_first_token_s"]) for row in rows],
        "per token ms": [_milliseconds(row["time_per_token_s"]) for row in rows],
        "tokens per step": ["" if not row["tokens_per_step"] else f"{row['tokens_per_step']:.2f}" for row in rows],
        "accepted": [" ".join(f"{share:.2f}" for share in row["acceptance"] or ()) for row in rows],
        "equal": [_equal(row) for row in rows],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]


def _ratio(figures: Json) -> str:
    if figures.get("ratio") is None:
        return ""
    return f"{figures['ratio']:.2f}x{_interval(figures)}"


def _interval(figures: Json) -> str:
    bounds = figures["ratio_interval"]
    return "" if bounds is None else f" ({bounds[0]:.2f}-{bounds[1]:.2f})"


def _milliseconds(distribution: Json | None) -> str:
    return "" if distribution is None else f"{1000 * distribution['median']:.1f}"


def _equal(figures: Json) -> str:
    return "" if figures.get("equal_answers") is None else f"{figures['equal_answers']}/{figures['compared_answers']}"


def recommendation_lines(report: Json) -> list[str]:
    """Say for each concurrency whether to serve heads, and with how many tokens: only what was measured to win."""
    advice = report["recommendation"]
    if not advice:
        return ["none: there is no measurement without heads to compare with (--against URL, or --serve)"]
    lines = []
    for one in advice:
        tokens = one["num_speculative_tokens"]
        setting = "heads as they were served" if tokens is None else f"num_speculative_tokens {tokens}"
        measured = f"{one['ratio']:.2f}x{_interval(one)}"
        if one["use"]:
            lines.append(f"concurrency {one['concurrency']}: {setting}, {measured}")
            continue
        verdict = {"loses": "slower", "undecided": "not measured to be faster"}[one["verdict"]]
        lines.append(f"concurrency {one['concurrency']}: off; the best, {setting}, is {verdict}: {measured}")
    return lines


def advice_note(report: Json) -> str:
    """Say how to read the recommendation; empty without one."""
    if not report["recommendation"]:
        return ""
    return (
        "A setting is recommended only where the whole interval lies above 1. A server has one setting for all its "
        "requests: choose by the concurrency of your traffic. These figures hold for this machine, model and bench."
    )


def terminal_report(report: Json) -> Group:
    """Return title, table, notes and recommendation for the terminal."""
    titles, rows = table_rows(report)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in titles:
        left = title in ("server", "accepted")
        table.add_column(title.replace(" ", "\n"), justify="left" if left else "right", no_wrap=title != "accepted")
    last = None
    for row in rows:
        if last not in (None, row[0]):
            table.add_section()
        table.add_row(*row)
        last = row[0]
    parts: list[Table | Text] = [Text(title_of(report), style="bold"), table]
    parts += [Text(f"note: {note}", style="yellow") for note in report["meta"]["notes"]]
    parts.append(Text("recommendation", style="bold"))
    parts += [Text(f"  {line}") for line in recommendation_lines(report)]
    return Group(*parts)


def markdown(report: Json) -> str:
    """Return the content of served.md."""
    titles, rows = table_rows(report)
    table = ["| " + " | ".join(titles) + " |", "|" + "---:|" * len(titles)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    blocks = [[f"# {title_of(report)}"], table, [f"- {line}" for line in HOW]]
    if notes := report["meta"]["notes"]:
        blocks += [["## Notes"], [f"- {note}" for note in notes]]
    blocks += [["## Run"], [f"- {label}: {value}" for label, value in meta_rows(_run_meta(report))]]
    blocks += [["## Recommendation"], [f"- {line}" for line in recommendation_lines(report)], [advice_note(report)]]
    return "\n\n".join("\n".join(block) for block in blocks).rstrip() + "\n"


def _run_meta(report: Json) -> Json:
    return {key: value for key, value in report["meta"].items() if key != "notes"}


def html_page(report: Json) -> str:
    """Return the content of served.html: tiles, charts, table, run, and the recommendation at the end."""
    meta = report["meta"]
    lines = "".join(f"<li>{escape(line)}</li>" for line in recommendation_lines(report))
    return document(
        title_of(report),
        [
            f"<h1>{escape(title_of(report))}</h1>",
            f"<p class=soft>{escape(str(meta['turns']))}; questions: {meta['questions']}, at most "
            f"{meta['max_new_tokens']} new tokens per answer; {escape(meta['date'])}</p>",
            _tiles(report),
            "".join(f"<p><b>Note:</b> {escape(note)}</p>" for note in meta["notes"]),
            "<h2>Speed</h2>",
            _legend(report),
            cards(_figures(report)),
            figures_table(*table_rows(report), overall=False),
            "".join(f"<p class=soft>{escape(line)}</p>" for line in HOW),
            "<h2>Run</h2>",
            meta_table(_run_meta(report)),
            "<h2>Recommendation</h2>",
            f"<ul>{lines}</ul><p class=soft>{escape(advice_note(report))}</p>",
        ],
    )


def _tiles(report: Json) -> str:
    tiles = []
    for one in report["recommendation"]:
        tokens = one["num_speculative_tokens"]
        on = f"{one['ratio']:.2f}x with " + ("heads" if tokens is None else f"k = {tokens}")
        tiles.append((on if one["use"] else "off", f"concurrency {one['concurrency']}"))
    body = "".join(f"<div class=tile><b>{escape(b)}</b><span>{escape(s)}</span></div>" for b, s in tiles)
    return f"<div class=tiles>{body}</div>" if tiles else ""


def _colours(report: Json) -> dict[str, int]:
    """Return the number of each server's colour."""
    return {name: number for number, name in enumerate(dict.fromkeys(row["server"] for row in rows_of(report)))}


def _legend(report: Json) -> str:
    chips = (f"<span class='chip h{n % PALETTE + 1}'>{escape(name)}</span>" for name, n in _colours(report).items())
    return f"<p>{''.join(chips)}</p>"


def _figures(report: Json) -> list[str]:
    rows, colours = rows_of(report), _colours(report)

    def groups(shown: Sequence[Json], key: str, interval: str | None = None) -> list[tuple[str, list[Bar]]]:
        by_concurrency: dict[str, list[Bar]] = {}
        for row in shown:
            value = row[key]["median"] * 1000 if isinstance(row[key], Mapping) else row[key]
            bar = Bar(value, row[interval] if interval else None, colours[row["server"]])
            by_concurrency.setdefault(str(row["concurrency"]), []).append(bar)
        return list(by_concurrency.items())

    drawn = []
    if compared := [row for row in rows if row.get("ratio") is not None]:
        drawing = bars(groups(compared, "ratio", "ratio_interval"), "ratio", unit="x", reference=1.0)
        caption = "Tokens per second with heads over those without, by concurrency. Whiskers: 95 % bootstrap intervals."
        drawn.append(figure("Speed over plain", drawing, caption))
    drawing = bars(groups(rows, "tokens_per_s"), "tokens per second", digits=0)
    drawn.append(figure("Tokens per second", drawing, "Of all concurrent answers together, by concurrency."))
    for key, title, caption in (
        ("time_to_first_token_s", "Time to first token", "Median over the answers, by concurrency."),
        ("time_per_token_s", "Time per token", "Median over the answers, without the first token, by concurrency."),
    ):
        drawn.append(figure(title, bars(groups(rows, key), title, unit=" ms", digits=1), caption))
    lowest = min((row["concurrency"] for row in rows), default=0)
    series = [
        Curve(row["server"], [(float(position), share) for position, share in enumerate(row["acceptance"], 1)])
        for row in rows
        if row["concurrency"] == lowest and row["acceptance"]
    ]
    if series:
        drawing = curves(series, "acceptance by position", "position in the draft", y_text=percent)
        drawn.append(figure("Acceptance by position", drawing, f"Share of accepted tokens, at concurrency {lowest}."))
    return drawn
