"""Write the part of a model card on what heads give in a server, from the reports of `medusa-eval --serve`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

TITLE = "## Measured through a server"
NOT_MEASURED = (
    f"{TITLE}\n\nNothing was measured through a server yet, so no N is recommended. "
    "`medusa-eval --serve --model RUN --bench BENCH` measures vLLM without these heads and with each N, at 1 to 32 "
    "concurrent requests, and recommends an N or no heads for each. Export again to add the results to this card."
)
#: A directory of this machine before a file name.
_DIRECTORY = re.compile(r"(?<![^\s'\"])~?/\S*/(?=[^\s/])")


def read_served(home: Path) -> list[dict[str, Any]]:
    """Return the reports of measured servers in a run directory that compare heads with plain decoding."""
    reports = []
    for path in sorted(home.glob("eval/served-*/served.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(report, dict) and report.get("recommendation"):
            reports.append(report)
    return reports


def served_section(served: Sequence[Json], reports: Sequence[Json]) -> str:
    """Return the section with settings, speeds, recommendation and tokens per step of measured servers.

    Args:
        served: contents of served.json, at least one.
        reports: contents of report.json of greedy evaluations, whose chain and tree are shown beside.
    """
    parts = [TITLE]
    for report in served:
        parts += [_describe(report), markdown_table(*speed_table(report)), f"**Recommendation**: {advice(report)}."]
    parts.append(
        "Tokens per second of all concurrent requests together, over those of the same server without heads, with the "
        "95 % interval. An N is recommended only where the whole interval lies above 1. These figures hold for that "
        "machine and load."
    )
    parts.append(markdown_table(*_tokens_per_step(served, reports)))
    parts.append("*Chain*, *tree*: tokens per step of this project's own loop; vLLM verifies the chain.")
    return "\n\n".join(parts)


def speed_table(report: Json) -> tuple[list[str], list[list[str]]]:
    """Return titles, and a row per concurrency: tokens/s without heads, their ratio for every N, and what to serve."""
    plain = {figures["concurrency"]: figures for figures in report["plain"]}
    ratios = {(one["concurrency"], _setting(one)): one for one in report["cells"] if one.get("ratio") is not None}
    settings = sorted({setting for _, setting in ratios}, key=lambda setting: (len(setting), setting))
    rows = []
    for one in report["recommendation"]:
        concurrency = one["concurrency"]
        rate = plain.get(concurrency)
        cells = [ratios.get((concurrency, setting)) for setting in settings]
        rows.append(
            [
                str(concurrency),
                "" if rate is None else f"{rate['tokens_per_s']:.1f}",
                *("" if cell is None else _ratio(cell) for cell in cells),
                choice(one),
            ]
        )
    return ["concurrency", "plain tokens/s", *settings, "serve"], rows


def advice(report: Json) -> str:
    """Return what to serve by concurrency: equal choices of adjacent concurrencies in one clause."""
    groups: list[tuple[str, list[str]]] = []
    for one in report["recommendation"]:
        if not groups or groups[-1][0] != choice(one):
            groups.append((choice(one), []))
        groups[-1][1].append(str(one["concurrency"]))
    return "; ".join(f"concurrency {', '.join(numbers)}: {chosen}" for chosen, numbers in groups)


def choice(one: Json) -> str:
    """Return the setting that an entry of `recommendation` advises, or off."""
    return _setting(one) if one["use"] else "off"


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *rows))


def _setting(figures: Json) -> str:
    """Return the number of draft tokens as in the card; a server without vLLM's counters does not tell it."""
    tokens = figures.get("num_speculative_tokens")
    return "heads" if tokens is None else f"N = {tokens}"


def _ratio(figures: Json) -> str:
    bounds = figures["ratio_interval"]
    return f"{figures['ratio']:.2f}x" + ("" if bounds is None else f" ({bounds[0]:.2f}-{bounds[1]:.2f})")


def _describe(report: Json) -> str:
    """Say what was measured in one sentence, and what to know of it; directories of this machine stay out."""
    meta = report["meta"]
    server = str(meta.get("server") or "an OpenAI-compatible server")
    if arguments := meta.get("arguments"):
        server += f", `{shlex.join(map(_without_directory, arguments))}`"
    parts = [f"{server}, {str(meta.get('date', ''))[:10]}."]
    parts.append(
        f"Bench {meta['bench']}, {meta['questions']} questions, {_decoding(meta)}, at most {meta['max_new_tokens']} "
        "new tokens."
    )
    parts += [f"Note: {_DIRECTORY.sub('', note)}." for note in meta.get("notes", ())]
    return " ".join(parts)


def _without_directory(argument: str) -> str:
    """Return an argument with only the last part of a local path in it."""
    option, equals, value = argument.rpartition("=")
    name = Path(value).name if value.startswith(("/", "~")) else _DIRECTORY.sub("", value)
    return option + equals + name


def _decoding(meta: Json) -> str:
    mode = meta.get("decoding") or {}
    return "greedy" if mode.get("acceptance", "greedy") == "greedy" else f"temperature {mode['temperature']:g}"


def _tokens_per_step(served: Sequence[Json], reports: Sequence[Json]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows: tokens per step by N in every server, and of the chain and the tree in every report."""
    rows: list[tuple[str, dict[int, float], float | None]] = []
    for report in served:
        rows.append((f"server, {report['meta']['bench']}, {_decoding(report['meta'])}", _rates(report), None))
    for report in reports:
        overall, bench = report.get("overall") or {}, (report.get("meta") or {}).get("bench")
        chain = dict(enumerate(overall.get("chain_rates") or (), start=1))
        if chain or overall.get("acceleration_rate") is not None:
            rows.append((f"chain and tree, {bench}, greedy", chain, overall.get("acceleration_rate")))
    numbers = sorted({number for _, rates, _ in rows for number in rates})
    titles = ["tokens per step", *(f"N = {number}" for number in numbers), "tree"]
    return titles, [
        [name, *(_figure(rates.get(number)) for number in numbers), _figure(tree)] for name, rates, tree in rows
    ]


def _rates(report: Json) -> dict[int, float]:
    """Return tokens per step by number of draft tokens, over all concurrencies."""
    sums: dict[int, tuple[float, int]] = {}
    for cell in report["cells"]:
        number, drafts = cell.get("num_speculative_tokens"), cell.get("drafts")
        if number and drafts:
            tokens, steps = sums.get(number, (0.0, 0))
            sums[number] = tokens + cell["tokens_per_step"] * drafts, steps + drafts
    return {number: tokens / steps for number, (tokens, steps) in sums.items()}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
