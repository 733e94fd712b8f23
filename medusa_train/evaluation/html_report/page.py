"""report.html: what report.json and answers.jsonl hold, drawn. A pure function of the two; opens without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from medusa_train.evaluation.html_report.charts import PALETTE, Bar, Curve, bars, columns, curves, tree_drawing
from medusa_train.inference.detokenize import guessing_heads

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


Answer = Mapping[str, Any]


def answers_section(answers: Sequence[Answer]) -> str:
    """All answers, folded, by category; the first of all is open. `answers` are the lines of answers.jsonl."""
    given = [answer for answer in answers if not answer.get("skipped")]
    if not given:
        return ""
    deepest = max((max(answer["accepted"], default=0) for answer in given), default=0)
    parts = [_legend(deepest)]
    categories: dict[str, list[Answer]] = {}
    for answer in given:
        categories.setdefault(answer["category"], []).append(answer)
    for number, (category, members) in enumerate(categories.items()):
        shown = "".join(_answer(answer, opened=number == 0 and place == 0) for place, answer in enumerate(members))
        counted = f"<span>{len(members)} answers</span>"
        opened = " open" if number == 0 else ""
        parts.append(f"<details{opened}><summary><b>{escape(category)}</b>{counted}</summary>{shown}</details>")
    skipped = len(answers) - len(given)
    if skipped:
        parts.append(
            f"<p class=soft>{skipped} turns were skipped: prompt and answer do not fit the model's context.</p>"
        )
    return "".join(parts)


def _legend(deepest: int) -> str:
    if not deepest:
        return "<p class=soft>No draft token was accepted in these answers.</p>"
    chips = "".join(f"<span class='chip {head_class(head)}'>head {head}</span>" for head in range(1, deepest + 1))
    return f"<p><span class='chip own'>the backbone itself</span>{chips}</p>"


def head_class(head: int) -> str:
    """The class that gives a head's tokens their background, counted from 1."""
    return f"h{(head - 1) % PALETTE + 1}"


def _answer(answer: Answer, *, opened: bool) -> str:
    tokens, steps = answer["tokens"], answer["steps"]
    facts = [f"turn {answer['turn']}", f"{tokens} tokens"]
    if steps:
        facts += [f"{steps} steps", f"{(tokens - 1) / steps:.2f} tokens per step"]
    if answer.get("loops"):
        facts.append("repeats itself")
    summary = f"question {escape(str(answer['question_id']))}<span>{', '.join(facts)}</span>"
    asked = f"<div class=asked>{escape(answer['asked'])}</div>" if answer.get("asked") else ""
    return (
        f"<details{' open' if opened else ''}><summary>{summary}</summary>{asked}"
        f"<div class=said>{coloured(answer)}</div></details>"
    )


def coloured(answer: Answer) -> str:
    """The answer's text with every run of tokens that heads guessed in its colours."""
    pieces = answer.get("pieces")
    if not pieces:
        return escape(answer["text"])
    by_head = zip(guessing_heads(len(pieces), answer["accepted"]), pieces, strict=True)
    html = []
    for head, run in groupby(by_head, key=lambda pair: pair[0]):
        text = escape("".join(piece for _, piece in run))
        html.append(f"<i class={head_class(head)}>{text}</i>" if head and text else text)
    return "".join(html)


CSS = """
:root{--paper:#fff;--card:#f7f8fa;--ink:#1a1d23;--soft:#5b6270;--rule:#d9dde4;--accent:#2f5fd0;
--c0:#2f6fd6;--c1:#d9822b;--c2:#2e9e6b;--c3:#b8447f;--c4:#7a57c8;--c5:#1f9fb5;--c6:#a58a1c;--c7:#c2503f;
--t0:#cfe0fb;--t1:#fbdfc0;--t2:#c9eeda;--t3:#f6d3e5;--t4:#e2d8fa;--t5:#c8ecf2;--t6:#efe6b5;--t7:#f7d3cc}
@media (prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1d2026;--ink:#e6e8ec;--soft:#9aa3b2;--rule:#343943;
--accent:#7fa5ff;--c0:#6ea0f5;--c1:#eda55c;--c2:#56c391;--c3:#e07fae;--c4:#a68bee;--c5:#55c5d8;--c6:#d1b94d;
--c7:#e98877;--t0:#24406f;--t1:#66421a;--t2:#1b5238;--t3:#642845;--t4:#45327a;--t5:#145562;--t6:#574a10;--t7:#67281e}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:25px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 10px}h3{font-size:14px;margin:0 0 8px}
p{margin:6px 0}.soft,figcaption{color:var(--soft)}figcaption{font-size:13px;margin-top:8px}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:20px 0 8px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 16px;min-width:150px}
.tile b{display:block;font-size:25px;line-height:1.3}.tile span{font-size:13px;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(330px,1fr));gap:16px}
.cards.two{grid-template-columns:repeat(auto-fit,minmax(460px,1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px}
figure.wide{grid-column:1/-1}svg{width:100%;height:auto;display:block;margin:0 auto}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .tick,svg .node{fill:var(--soft);font-size:11px}
svg .node{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
svg .value{font-weight:600}svg .grid{stroke:var(--rule)}
svg .reference{stroke:var(--soft);stroke-dasharray:4 3}svg .whisker{stroke:var(--ink);stroke-width:1.3}
svg .edge{fill:none;stroke:var(--soft);opacity:.45}svg .root{fill:var(--ink)}
svg .curve{fill:none;stroke-width:2}svg .ringed{stroke:var(--ink);stroke-width:2}
.scroll{overflow-x:auto;margin-top:18px}table{border-collapse:collapse;font-size:14px;width:100%}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600;color:var(--soft);white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tr.all td{font-weight:700}
table.facts td{text-align:left;white-space:normal;vertical-align:top;overflow-wrap:anywhere}
table.facts td:first-child{color:var(--soft);white-space:nowrap}
details{border:1px solid var(--rule);border-radius:8px;margin:8px 0;background:var(--card)}
details details{margin:8px 12px;background:var(--paper)}
summary{cursor:pointer;padding:8px 14px}summary span{color:var(--soft);margin-left:8px;font-size:13px}
.asked{padding:0 14px;color:var(--soft);white-space:pre-wrap}
.said{padding:4px 14px 14px;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75}
.said i,.chip{font-style:normal;border-radius:3px}.chip{padding:1px 7px;margin-right:6px;font-size:13px}
.chip.own{border:1px solid var(--rule)}
"""

_SERIES = "".join(
    f"svg .s{n}{{fill:var(--c{n})}}svg .curve.s{n}{{fill:none;stroke:var(--c{n})}}.h{n + 1}{{background:var(--t{n})}}"
    for n in range(8)
)

STYLE = CSS + _SERIES
