"""Render report.html (tiles, charts, tables and coloured answers of one evaluation) and compare.html (of several)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from medusa_train.evaluation.decoding_mode import describe_settings, settings_of
from medusa_train.evaluation.html_report.charts import PALETTE, Bar, Curve, bars, columns, curves, tree_drawing
from medusa_train.evaluation.html_report.layout import (
    CTAR_CAPTION,
    SPEEDUP_CAPTION,
    cards,
    document,
    figure,
    figures_table,
    percent,
)

Json = Mapping[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def html_page(report: Json, answers: Sequence[Json], table: Table, notes: Sequence[str]) -> str:
    """Render the page of one evaluation.

    Args:
        report: content of report.json.
        answers: lines of answers.jsonl.
        table: titles and rows of the figures, the overall row last, as in report.md.
        notes: sentences that say how to read the figures.
    """
    meta = report["meta"]
    name = meta["model"] or meta["base_model"]
    setting = (
        f"{describe_settings(settings_of(meta))}; {meta['dtype']} on {meta['device']}, threads: {meta['threads']}; "
        f"questions: {meta['questions']}, at most {meta['max_new_tokens']} new tokens per answer; {meta['date']}"
    )
    sections = [
        f"<h1>{escape(str(meta['bench']))}: {escape(str(name))}</h1>",
        f"<p class=soft>{escape(setting)}</p>",
        _tiles(report),
        "".join(f"<p>{escape(note)}</p>" for note in notes),
        "<h2>Speed</h2>",
        cards(_speed_figures(report)),
        figures_table(*table),
        _decoders_table(report),
        _draft_section(report),
        "<h2>Answers</h2>",
        answers_section(answers),
        "<h2>Run</h2>",
        meta_table(meta),
    ]
    return document(f"{meta['bench']}: {name}", sections)


def _tiles(report: Json) -> str:
    overall = report["overall"]
    tiles: list[tuple[str, str]] = []

    def tile(key: str, label: str, suffix: str = "", scale: float = 1.0, digits: int = 2) -> None:
        if (value := overall[key]) is not None:
            bounds = overall["intervals"].get(key)
            interval = f" ({bounds[0] * scale:.{digits}f}-{bounds[1] * scale:.{digits}f})" if bounds else ""
            tiles.append((f"{value * scale:.{digits}f}{suffix}", label + interval))

    tile("speedup", "speedup over plain decoding", "x")
    if overall["looping_answers"]:
        tile("speedup_without_loops", "speedup without answers that loop", "x")
    tile("acceleration_rate", "tokens per step on this bench")
    tile("overhead", "overhead: step latency over a plain step's")
    tile("tokens_per_s", "tokens per second", digits=0)
    tile("time_to_first_token_s", "time to first token", " ms", 1000, 1)
    answers = overall["answers"]
    if (equal := overall["equal_answers"]) is not None:
        ties = f" + {overall['tie_answers']} ties" if overall["tie_answers"] else ""
        tiles.append((f"{equal} / {answers}", f"answers equal to plain ones in float32{ties}"))
    if (equal := overall["equal_answers_bf16"]) is not None:
        tiles.append((f"{equal} / {answers}", "answers equal to plain ones in bfloat16"))
    if (joint := report.get("joint")) is not None:
        label = f"perplexity after joint training ({joint['perplexity_before']:.2f} before)"
        tiles.append((f"{joint['perplexity_after']:.2f}", label))
    scores, judged = overall["scores"], report.get("judge")
    if scores is not None:
        tiles.append(_score_tile(scores))
    if judged is None or judged["score"] is None:
        if scores is None:
            tiles.append(("not judged", "quality of the answers"))
    else:
        tiles.append((f"{judged['score']:.2f} / 10", f"quality, graded by {judged['model']}"))
    if report["meta"]["model"] is None:
        tiles.append((f"{overall['baseline_tokens_per_s']:.0f}", "tokens per second, plain decoding"))
    return (
        "<div class=tiles>"
        + "".join(f"<div class=tile><b>{escape(b)}</b><span>{escape(s)}</span></div>" for b, s in tiles)
        + "</div>"
    )


def _score_tile(scores: Json) -> tuple[str, str]:
    """Return the share of correct answers and its label: the tree's, beside plain decoding's."""
    score = scores.get("tree", scores["plain"])
    low, high = score["interval"]
    label = f"{scores['metric']}: {score['correct']} of {scores['answers']} ({low:.1%}-{high:.1%})"
    if "tree" in scores:
        label += f"; plain {scores['plain']['rate']:.1%}" if scores["differing"] else "; plain decoding is equal"
    return f"{score['rate']:.1%}", label


def _speed_figures(report: Json) -> list[str]:
    overall, categories = report["overall"], report["categories"]
    figures = []
    if overall["speedup"] is not None:
        groups = [(name, [Bar(f["speedup"], f["intervals"].get("speedup"))]) for name, f in categories.items()]
        groups.append(("overall", [Bar(overall["speedup"], overall["intervals"].get("speedup"), 1)]))
        drawing = bars(groups, "speedup per category", unit="x", reference=1.0)
        figures.append(figure("Speedup per category", drawing, SPEEDUP_CAPTION))
    rates = [("tree", overall["tokens_per_s"], overall["intervals"].get("tokens_per_s"), 1)]
    rates += [(name, baseline["tokens_per_s"], None, 0) for name, baseline in overall["baselines"].items()]
    groups = [(name.replace("_", " "), [Bar(rate, bounds, colour)]) for name, rate, bounds, colour in rates if rate]
    drawing = bars(groups, "tokens per second", digits=0, width=480)
    caption = "Total tokens over total time, prefill included. The decoders took turns on every prompt or batch."
    figures.append(figure("Tokens per second", drawing, caption))
    return figures


def _decoders_table(report: Json) -> str:
    """Render the tree and its baselines, those of transformers included, on the whole bench."""
    overall = report["overall"]
    decoders = {name.replace("_", " "): figures for name, figures in overall["baselines"].items()}
    if overall["tokens_per_s"] is not None:
        decoders = {"tree": {**overall, "tokens_per_step": overall["acceleration_rate"], "speedup": None}, **decoders}
    greedy = settings_of(report["meta"])["acceptance"] == "greedy"  # other modes' answers are samples
    rows = [
        [
            name,
            _cell(figures["tokens_per_s"], 0),
            _cell(figures["tokens_per_step"], 2),
            _cell(figures["speedup"], 2, "x"),
            *([str(figures.get("equal_to_plain", "-"))] if greedy else []),
        ]
        for name, figures in decoders.items()
    ]
    titles = ["decoder", "tokens/s", "tokens per step", "tree's speedup over it"]
    return figures_table([*titles, *(["answers equal to plain ones"] if greedy else [])], rows, overall=False)


def _cell(value: float | None, digits: int, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def _draft_section(report: Json) -> str:
    overall, figures = report["overall"], []
    if lengths := overall["accepted_lengths"]:
        steps = sum(lengths)
        shares = [count / steps for count in lengths]
        drawing = columns(shares, "accepted draft tokens per step", "accepted draft tokens")
        caption = f"Share of the {steps:,} decoding steps by number of accepted draft tokens."
        figures.append(figure("Accepted length", drawing, caption))
    if shares := overall["ctar"]:
        drawing = curves([Curve("CTAR", list(enumerate(shares, start=1)))], "CTAR", "w", y_text=percent)
        figures.append(figure("CTAR(w)", drawing, CTAR_CAPTION))
    if table := overall["head_accuracy"]:
        heads = [Curve(f"head {k}", list(enumerate(row, start=1))) for k, row in enumerate(table, start=1)]
        drawing = curves(heads, "head accuracy", "k", y_text=percent)
        caption = "Top-k accuracy: share of positions where the answer's token is among the head's k most probable."
        figures.append(figure("Head accuracy", drawing, caption))
    if calibration := report.get("calibration"):
        figures += _size_figures(calibration["sizes"], calibration.get("nodes"))
    if tree := report.get("tree"):
        figures.append(_tree_figure(tree, overall["chain_acceleration_rate"], report["meta"].get("early_stop")))
    return "<h2>Draft</h2>" + cards(figures) if figures else ""


def _size_figures(sizes: Sequence[Json], chosen: int | None) -> list[str]:
    """Draw simulated tokens per step and tokens per second over the number of nodes; the chosen size ringed."""
    marked = [] if chosen is None else [float(chosen)]
    per_step = Curve("tree", [(s["nodes"], s["tokens_per_step"]) for s in sizes], marked)
    per_second = Curve("tree", [(s["nodes"], s["tokens_per_s"]) for s in sizes], marked)
    return [
        figure(
            "Tokens per step over tree size",
            curves([per_step], "tokens per step over tree size", "nodes", from_zero=False),
            "From the tree's calibration, not from this bench: simulated on answers that the tree was not fitted to. "
            "The ring marks the chosen size.",
        ),
        figure(
            "Speed over tree size",
            curves([per_second], "tokens per second over tree size", "nodes", from_zero=False),
            "From the tree's calibration: simulated tokens per step over the measured step latency, without prefill.",
        ),
    ]


def _tree_figure(tree: Json, chain: float | None, early_exit: float | None) -> str:
    caption = f"{len(tree['medusa_choices'])} nodes. Below each node: the share of steps in which it was accepted."
    if early_exit:
        caption += " Simulated without the draft's early exit."
    if chain is not None:
        caption += f" The chain of top-1 guesses alone would give {chain:.2f} tokens per step (simulated)."
    return figure("The tree", tree_drawing(tree["medusa_choices"], tree["accepted"]), caption, wide=True)


def answers_section(answers: Sequence[Json]) -> str:
    """Render all answers by category, collapsed except for the very first one.

    Args:
        answers: lines of answers.jsonl, skipped turns included.
    """
    answered = [answer for answer in answers if not answer.get("skipped")]
    if not answered:
        return ""
    categories: dict[str, list[Json]] = {}
    for answer in answered:
        categories.setdefault(answer["category"], []).append(answer)
    parts = [_legend(max((max(answer["accepted"], default=0) for answer in answered), default=0))]
    for number, (category, members) in enumerate(categories.items()):
        body = "".join(_answer(answer, opened=number == 0 and index == 0) for index, answer in enumerate(members))
        summary = f"<summary><b>{escape(category)}</b><span>{len(members)} answers</span></summary>"
        parts.append(f"<details{' open' if number == 0 else ''}>{summary}{body}</details>")
    if skipped := len(answers) - len(answered):
        parts.append(
            f"<p class=soft>{skipped} turns were skipped: prompt and answer do not fit the model's context.</p>"
        )
    return "".join(parts)


def _legend(heads: int) -> str:
    if not heads:
        return "<p class=soft>No draft token was accepted in these answers.</p>"
    chips = "".join(f"<span class='chip {_head_class(head)}'>head {head}</span>" for head in range(1, heads + 1))
    return (
        f"<p><span class=soft>Accepted tokens by source: </span><span class='chip backbone'>backbone</span>{chips}</p>"
    )


def _head_class(head: int) -> str:
    """Return the CSS class of a head's background colour; heads count from 1."""
    return f"h{(head - 1) % PALETTE + 1}"


def _answer(answer: Json, *, opened: bool) -> str:
    tokens, steps = answer["tokens"], answer["steps"]
    details = [f"turn {answer['turn']}", f"{tokens} tokens"]
    if steps:
        details += [f"{steps} steps", f"{(tokens - 1) / steps:.2f} tokens per step"]
    if answer.get("loops"):
        details.append("loops")
    details += _score_details(answer.get("scores") or {})
    summary = f"question {escape(str(answer['question_id']))}<span>{escape(', '.join(details))}</span>"
    asked = f"<div class=question>{escape(answer['asked'])}</div>" if answer.get("asked") else ""
    return (
        f"<details{' open' if opened else ''}><summary>{summary}</summary>{asked}"
        f"<div class=answer>{coloured_text(answer)}</div></details>"
    )


def _score_details(scores: Json) -> list[str]:
    """Say whether an answer is correct and why not, and plain decoding's score where it differs."""
    if not scores:
        return []

    def verdict(score: Json) -> str:
        return "correct" if score["correct"] else f"wrong ({score['detail']})"

    plain, reported = scores["plain"], scores.get("tree", scores["plain"])
    return [verdict(reported)] + ([f"plain: {verdict(plain)}"] if plain["correct"] != reported["correct"] else [])


def coloured_text(answer: Json) -> str:
    """Render an answer's text with every run of draft tokens in the colour of the head that proposed it."""
    pieces = answer.get("pieces")
    if not pieces:
        return escape(answer["text"])
    by_head = zip(proposing_heads(len(pieces), answer["accepted"]), pieces, strict=True)
    html = []
    for head, run in groupby(by_head, key=lambda pair: pair[0]):
        text = escape("".join(piece for _, piece in run))
        html.append(f"<i class={_head_class(head)}>{text}</i>" if head and text else text)
    return "".join(html)


def proposing_heads(tokens: int, accepted: Sequence[int]) -> list[int]:
    """Return which head proposed each token of an answer: k for head k, 0 for the backbone.

    The first token comes from the prefill. Each step then adds as many tokens as `accepted` says, by heads 1, 2, ...,
    and one by the backbone, unless the answer ends before it.
    """
    heads = [0]
    for length in accepted:
        heads += [*range(1, length + 1), 0]
    return (heads + [0] * tokens)[:tokens]


#: Labels of `meta` keys that are not clear as they are.
META_LABELS = {
    "chat_template_kwargs": "variables of the chat template",
    "packed": "prepacked weights",
    "compiled": "torch.compile",
    "early_stop": "early exit threshold of the draft",
    "plain_equal_generate": "plain answers equal to generate's",
    "exactness": "answers compared in",
    "resumed_turns": "turns measured before an interruption",
    "seconds": "seconds in all",
    "baseline_tokens_per_s": "plain",
    "generate_tokens_per_s": "generate",
}


def meta_rows(meta: Json) -> list[tuple[str, str]]:
    """Return label and text of every entry of `meta`, for the pages of a report."""
    return [(_meta_label(key), _meta_text(value)) for key, value in meta.items()]


def _meta_label(key: str) -> str:
    return META_LABELS.get(key, key.replace("_", " "))


def _meta_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{_meta_label(key)}: {item}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def meta_table(meta: Json) -> str:
    """Render every entry of `meta`."""
    rows = [f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>" for label, text in meta_rows(meta)]
    return f"<table class=meta>{''.join(rows)}</table>"


# Comparison of runs


def compare_page(reports: Json, runs: Table, categories: Table, differences: Sequence[str]) -> str:
    """Render the page of a comparison.

    Args:
        reports: content of each report.json by run name, in the order to show.
        runs: titles and rows of the table of runs.
        categories: titles and rows of the table of speedups per category.
        differences: lines that name conditions in which the runs differ.
    """
    chips = "".join(
        f"<span class='chip h{number % PALETTE + 1}'>{escape(name)}</span>" for number, name in enumerate(reports)
    )
    return document(
        "Comparison of runs",
        [
            "<h1>Comparison of runs</h1>",
            f"<p>{chips}</p>",
            "".join(f"<p><b>Not comparable as they stand:</b> {escape(line)}</p>" for line in differences),
            figures_table(*runs, overall=False),
            "<h2>Speed</h2>",
            cards([_speedup_figure(reports), *_draft_figures(reports)]),
            figures_table(*categories, overall=False),
        ],
    )


def _speedup_figure(reports: Json) -> str:
    categories = dict.fromkeys(category for report in reports.values() for category in report["categories"])
    groups = [
        (category, [_bar(report["categories"].get(category), n) for n, report in enumerate(reports.values())])
        for category in categories
    ]
    groups.append(("overall", [_bar(report["overall"], n) for n, report in enumerate(reports.values())]))
    drawing = bars(groups, "speedup per category and run", unit="x", reference=1.0, width=760)
    return figure("Speedup per category", drawing, SPEEDUP_CAPTION, wide=True)


def _bar(figures: Json | None, colour: int) -> Bar:
    if figures is None:
        return Bar(None, colour=colour)
    return Bar(figures.get("speedup"), figures.get("intervals", {}).get("speedup"), colour)


def _draft_figures(reports: Json) -> list[str]:
    """Draw CTAR and top-1 accuracy where every run has them."""
    shares = {name: report["overall"].get("ctar") or [] for name, report in reports.items()}
    accuracy = {name: report["overall"].get("head_accuracy") or [] for name, report in reports.items()}
    figures = []
    if all(shares.values()):
        series = [Curve(name, list(enumerate(values, start=1))) for name, values in shares.items()]
        figures.append(figure("CTAR(w)", curves(series, "CTAR of every run", "w", y_text=percent), CTAR_CAPTION))
    if all(accuracy.values()):
        series = [Curve(name, [(k, row[0]) for k, row in enumerate(rows, 1)]) for name, rows in accuracy.items()]
        drawing = curves(series, "top-1 accuracy of every run", "head", y_text=percent)
        figures.append(figure("Top-1 accuracy per head", drawing, "On the answers of the bench."))
    return figures
