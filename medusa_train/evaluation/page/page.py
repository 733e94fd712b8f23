"""report.html: what report.json and answers.jsonl hold, drawn. A pure function of the two; opens without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from medusa_train.evaluation.page.answers import answers_section
from medusa_train.evaluation.page.charts import Bar, Curve, bars, columns, curves
from medusa_train.evaluation.page.style import STYLE
from medusa_train.evaluation.page.tree_drawing import tree_drawing

Json = Mapping[str, Any]

#: The page may show what is in it and nothing else: answers of a model are not to be trusted.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(report: Json, answers: Sequence[Json], table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    """The page of one evaluation.

    Args:
        report: the content of report.json. answers: the lines of answers.jsonl.
        table: titles and rows of the figures, the overall row last, as in report.md.
    """
    meta = report["meta"]
    name = meta["model"] or meta["base_model"]
    where = (
        f"{meta['dtype']} on {meta['device']}, {meta['threads']} threads; {meta['questions']} questions, "
        f"answers of at most {meta['max_new_tokens']} tokens; {meta['date']}"
    )
    sections = [
        f"<h1>{escape(str(meta['bench']))}: {escape(str(name))}</h1>",
        f"<p class=soft>{escape(where)}</p>",
        _tiles(report),
        "<h2>Speed</h2>",
        _cards(_speed_figures(report)),
        figures_table(*table),
        _draft_section(report),
        "<h2>Answers</h2>",
        answers_section(answers),
        "<h2>Run</h2>",
        _facts(meta),
    ]
    return document(f"{meta['bench']}: {name}", sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A whole page without anything from elsewhere."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(section for section in sections if section)
        + "</main></body></html>\n"
    )


def figure(title: str, drawing: str, caption: str, *, wide: bool = False) -> str:
    """A card with a drawing."""
    cls = " class=wide" if wide else ""
    return f"<figure{cls}><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def _cards(figures: Sequence[str]) -> str:
    return f"<div class=cards>{''.join(figures)}</div>" if figures else ""


def figures_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, overall: bool = True) -> str:
    """A table; its last row stands out where it is the overall one."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        f"<tr{' class=all' if overall and number == len(rows) - 1 else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _tiles(report: Json) -> str:
    overall = report["overall"]
    found = overall["intervals"]
    shown: list[tuple[str, str]] = []

    def tile(key: str, what: str, suffix: str = "", scale: float = 1.0, digits: int = 2) -> None:
        if (value := overall[key]) is not None:
            low_high = found.get(key)
            between = f" ({low_high[0] * scale:.{digits}f}-{low_high[1] * scale:.{digits}f})" if low_high else ""
            shown.append((f"{value * scale:.{digits}f}{suffix}", what + between))

    tile("speedup", "over the same loop without a tree", "x")
    if overall["looping_answers"]:
        tile("speedup_without_loops", "the same without answers that repeat themselves", "x")
    tile("acceleration_rate", "tokens per step")
    tile("overhead", "overhead of a step")
    tile("tokens_per_s", "tokens per second", digits=0)
    tile("time_to_first_token_s", "until the first token", " ms", 1000, 1)
    if overall["equal_answers"] is not None:
        ties = f" + {overall['tie_answers']}" if overall["tie_answers"] else ""
        shown.append(
            (f"{overall['equal_answers']}{ties} / {overall['answers']}", "answers equal to plain ones, float32")
        )
    if (joint := report.get("joint")) is not None:
        before = f"perplexity after joint training ({joint['perplexity_before']:.2f} before)"
        shown.append((f"{joint['perplexity_after']:.2f}", before))
    judged = report.get("judge")
    if judged is None or judged["score"] is None:
        shown.append(("not judged", "quality"))
    else:
        shown.append((f"{judged['score']:.2f} / 10", f"graded by {judged['model']}"))
    if report["meta"]["model"] is None:
        shown.append((f"{overall['baseline_tokens_per_s']:.0f}", "tokens per second, plain decoding"))
    return (
        "<div class=tiles>"
        + "".join(f"<div class=tile><b>{escape(b)}</b><span>{escape(s)}</span></div>" for b, s in shown)
        + "</div>"
    )


def _speed_figures(report: Json) -> list[str]:
    overall, categories = report["overall"], report["categories"]
    figures = []
    if overall["speedup"] is not None:
        groups = [(name, [Bar(f["speedup"], f["intervals"].get("speedup"))]) for name, f in categories.items()]
        groups.append(("overall", [Bar(overall["speedup"], overall["intervals"].get("speedup"), 1)]))
        drawing = bars(groups, "speedup per category", unit="x", reference=1.0)
        caption = "Total tokens per second over the loop with the empty tree; whiskers: 95 % bootstrap over questions."
        figures.append(figure("Speedup per category", drawing, caption))
    rates = [("tree", overall["tokens_per_s"], overall["intervals"].get("tokens_per_s"), 1)]
    rates += [(name, compared["tokens_per_s"], None, 0) for name, compared in overall["baselines"].items()]
    shown = [(name.replace("_", " "), [Bar(rate, low_high, c)]) for name, rate, low_high, c in rates if rate]
    drawing = bars(shown, "tokens per second", digits=0, width=480)
    figures.append(figure("Tokens per second", drawing, "All decoders took turns on every prompt, prefill included."))
    return figures


def _draft_section(report: Json) -> str:
    overall, figures = report["overall"], []
    if lengths := overall["accepted_lengths"]:
        steps = sum(lengths)
        drawing = columns(
            [count / steps for count in lengths], "accepted draft tokens per step", "accepted draft tokens"
        )
        figures.append(
            figure("Accepted length", drawing, f"Share of {steps:,} steps that accepted so many draft tokens.")
        )
    if shares := overall["ctar"]:
        drawing = curves(
            [Curve("CTAR", list(enumerate(shares, start=1)))], "CTAR", "w", y_text=lambda y: f"{100 * y:g} %"
        )
        figures.append(figure("CTAR(w)", drawing, "Share of the steps that accepted at least w draft tokens."))
    if table := overall["head_accuracy"]:
        heads = [Curve(f"head {k}", list(enumerate(row, start=1))) for k, row in enumerate(table, start=1)]
        drawing = curves(heads, "head accuracy", "best k guesses", y_text=lambda y: f"{100 * y:g} %")
        figures.append(figure("Head accuracy", drawing, "The token that came is among a head's best k guesses."))
    if calibration := report.get("calibration"):
        figures += size_figures(calibration["sizes"], calibration.get("nodes"))
    if tree := report.get("tree"):
        chain = overall["chain_acceleration_rate"]
        caption = f"{len(tree['medusa_choices'])} nodes; per node, the share of the steps in which it was accepted."
        if report["meta"].get("early_stop"):
            caption += " Counted as if the draft never stopped early, which it does."
        if chain is not None:
            caption += f" The chain of first guesses alone would have made {chain:.2f} tokens per step."
        drawing = tree_drawing(tree["medusa_choices"], tree["accepted"])
        figures.append(figure("The tree", drawing, caption, wide=True))
    return "<h2>Draft</h2>" + _cards(figures) if figures else ""


def size_figures(sizes: Sequence[Json], chosen: int | None) -> list[str]:
    """Expected tokens per step, and tokens per second, over the number of nodes; the chosen size ringed."""
    marked = [] if chosen is None else [float(chosen)]
    per_step = Curve("tree", [(s["nodes"], s["tokens_per_step"]) for s in sizes], marked)
    per_second = Curve("tree", [(s["nodes"], s["tokens_per_s"]) for s in sizes], marked)
    return [
        figure(
            "Tokens per step over tree size",
            curves([per_step], "tokens per step over tree size", "nodes", from_zero=False),
            "Expected on answers that the tree was not fitted to; ringed: the size that was chosen.",
        ),
        figure(
            "Speed over tree size",
            curves([per_second], "tokens per second over tree size", "nodes", from_zero=False),
            "Expected tokens per second, from measured latencies of a step; prefill left out.",
        ),
    ]


def _facts(meta: Json) -> str:
    rows = []
    for key, value in meta.items():
        if isinstance(value, Mapping):
            value = "; ".join(f"{name}: {item}" for name, item in value.items())
        shown = escape("-" if value is None else str(value))
        rows.append(f"<tr><td>{escape(key.replace('_', ' '))}</td><td>{shown}</td></tr>")
    return f"<table class=facts>{''.join(rows)}</table>"
