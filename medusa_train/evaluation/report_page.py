"""The parts of report.html and report.md: tiles, charts, tables and colored answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from medusa_train.evaluation.answer_scores import LEAST_QUESTIONS
from medusa_train.inference.decoding_mode import describe_mode, mode_of
from medusa_train.pages.charts import Bar, Curve, bars, curves, tree_drawing
from medusa_train.pages.page import (
    Figure,
    PageSection,
    Table,
    number,
    render_page,
)

Json = Mapping[str, Any]

#: What the columns mean, by column title. A text may explain several columns; then its key is the
#: first of them.
TERMS = {
    "tokens per step": "tokens per step: generated tokens per forward pass of the model; 1.0 for"
    " plain decoding.",
    "overhead": "overhead: time of a step with the tree divided by time of a plain step.",
    "speedup": "speedup: tokens per second over those of the same loop without a tree, prefill"
    " included; over generate: over those of generate of transformers.",
    "equal fp32": "equal fp32, equal bf16: answers that equal plain greedy decoding token for"
    " token; +n had two best tokens with the same logit. In bfloat16 passes over one token and"
    " over several round differently.",
    "loops": "loops: answers that repeat eight tokens three times, which are easier to draft.",
}
ENOUGH = f"of which at least {LEAST_QUESTIONS} show how much they vary"
BRACKETS = f"Brackets hold 95 % bootstrap intervals over questions, {ENOUGH}."
SPEEDUP_CAPTION = (
    "Total tokens per second over those of plain decoding (the same loop without a tree). "
    f"Whiskers: 95 % bootstrap intervals over questions, {ENOUGH}."
)


def sections_of(
    report: Json,
    answers: Sequence[Json],
    tables: Sequence[Table],
    summary: Sequence[str],
) -> list[PageSection]:
    """Return the sections of report.html and report.md.

    Args:
        summary: sentences that say what was measured and how to read the metrics.
    """
    shown = {title for table in tables for title in table.titles}
    terms = [text for title, text in TERMS.items() if title in shown]
    return [
        PageSection(lines=summary),
        PageSection(
            "Speed", figures=_speed_charts(report), tables=tables, remarks=[*terms, BRACKETS]
        ),
        PageSection(
            "Draft", figures=_draft_charts(report), remarks=_draft_remarks(report["overall"])
        ),
        answers_section(answers),
        PageSection("Run", facts=meta_rows(report["meta"])),
    ]


def html_page(report: Json, sections: Sequence[PageSection]) -> str:
    """Render report.html."""
    meta, overall = report["meta"], report["overall"]
    setting = (
        f"{describe_mode(mode_of(meta))}; {meta['dtype']} on {meta['device']}, threads:"
        f" {meta['threads']}; questions: {meta['questions']}, at most {meta['max_new_tokens']} new"
        f" tokens per answer; {meta['date']}"
    )
    interval = overall["intervals"].get("speedup_over_fastest")
    first_token_ms = None
    if overall["time_to_first_token_s"] is not None:
        first_token_ms = 1000 * overall["time_to_first_token_s"]
    plain_rate = number(overall["baseline_tokens_per_s"], 0)
    tiles = [
        (
            number(overall["speedup_over_fastest"], 2, "x", interval),
            f"speedup over {_faster_baseline(overall)}",
        ),
        (number(overall["acceleration_rate"]), "tokens per step on this benchmark"),
        (number(overall["tokens_per_s"], 0), "tokens per second on this benchmark"),
        (plain_rate, "tokens per second on this benchmark, plain decoding"),
        (number(first_token_ms, 1, " ms"), "time to first token"),
    ]
    title = f"{meta['bench']}: {meta['model'] or meta['base_model']}"
    return render_page(title, setting, sections, [tile for tile in tiles if tile[0] != "-"])


def _faster_baseline(overall: Json) -> str:
    """Name the faster of plain decoding and `generate` on the whole benchmark."""
    generate = overall["generate_tokens_per_s"]
    if generate is None:
        return "plain decoding"
    is_generate = generate > overall["baseline_tokens_per_s"]
    return f"{'generate' if is_generate else 'plain decoding'}, the faster baseline"


def _speed_charts(report: Json) -> list[Figure]:
    overall = report["overall"]
    charts = []
    if overall["speedup"] is not None and len(report["categories"]) > 1:
        charts.append(speedup_chart({"": report}))
    # one bar per decoder
    groups = []
    if overall["tokens_per_s"]:
        interval = overall["intervals"].get("tokens_per_s")
        groups.append(("tree", [Bar(overall["tokens_per_s"], interval, 1)]))
    for name, baseline in overall["baselines"].items():
        groups.append((name.replace("_", " "), [Bar(baseline["tokens_per_s"])]))
    drawing = bars(groups, "tokens per second", digits=0)
    caption = (
        "Total tokens over total time, prefill included. The decoders took turns on every prompt or"
        " batch."
    )
    return [*charts, Figure("Tokens per second", drawing, caption)]


def speedup_chart(reports: Mapping[str, Json]) -> Figure:
    """Draw the speedups per category and overall, of one run or of several runs next to each other.
    With a single category there is no overall bar.
    """
    several = len(reports) > 1
    shown = category_names(reports)
    if len(shown) != 1:
        shown.append("overall")
    groups = []
    for category in shown:
        group = []
        for index, report in enumerate(reports.values()):
            metrics = {**report["categories"], "overall": report["overall"]}.get(category, {})
            interval = metrics.get("intervals", {}).get("speedup")
            colour = index if several else int(category == "overall")
            group.append(Bar(metrics.get("speedup"), interval, colour))
        groups.append((category, group))
    drawing = bars(groups, "speedup per category", unit="x", reference=1.0)
    return Figure("Speedup per category", drawing, SPEEDUP_CAPTION, wide=several)


def category_names(reports: Mapping[str, Json]) -> list[str]:
    """List the categories of all reports, in the order in which they first appear."""
    return list(dict.fromkeys(chain.from_iterable(one["categories"] for one in reports.values())))


def _draft_charts(report: Json) -> list[Figure]:
    overall = report["overall"]
    charts = []

    lengths = overall["accepted_lengths"]
    if lengths:
        steps = sum(lengths)
        groups = [(str(length), [Bar(100 * count / steps)]) for length, count in enumerate(lengths)]
        drawing = bars(groups, "accepted draft tokens per step", unit=" %", digits=0)
        caption = f"Share of the {steps:,} decoding steps by number of accepted draft tokens."
        charts.append(Figure("Accepted length", drawing, caption))

    accuracies = overall["head_accuracy"]
    if accuracies:
        heads = [
            Curve(f"head {k}", list(enumerate(row, start=1)))
            for k, row in enumerate(accuracies, start=1)
        ]
        drawing = curves(heads, "head accuracy", "k", y_text=lambda share: f"{100 * share:g} %")
        caption = (
            "Top-k accuracy: share of positions where the answer's token is among the head's k most"
            " probable."
        )
        charts.append(Figure("Head accuracy", drawing, caption))

    calibration = report.get("calibration")
    if calibration:
        charts += size_charts(calibration["sizes"], calibration.get("nodes"))

    tree = report.get("tree")
    if tree:
        caption = (
            f"{len(tree['medusa_choices'])} nodes. Below each node: the share of steps in which it"
            " was accepted."
        )
        if report["meta"].get("early_stop"):
            caption += " Simulated without the draft's early exit."
        if overall["chain_rates"]:
            caption += (
                f" The chain of top-1 guesses alone would give {overall['chain_rates'][-1]:.2f}"
                " tokens per step (simulated)."
            )
        drawing = tree_drawing(tree["medusa_choices"], tree["accepted"])
        charts.append(Figure("The tree", drawing, caption, wide=True))
    return charts


def _draft_remarks(overall: Json) -> list[str]:
    """List the metrics of the whole benchmark that have no column."""

    def listed(values: Sequence[Any], form: str) -> str:
        return ", ".join(f"{place}: {value:{form}}" for place, value in enumerate(values, start=1))

    lines = []
    if overall["chain_rates"]:
        lines.append(
            "tokens per step with the chain of the first k heads' top-1 guesses (simulated), k ="
            f" {listed(overall['chain_rates'], '.2f')}"
        )
    if overall["ctar"]:
        shares = listed(overall["ctar"], ".1%")
        lines.append(f"CTAR(w), steps that accepted at least w draft tokens: {shares}")
    if overall["head_accuracy"]:
        heads = [
            f"head {k}: {row[0]:.1%} / {row[4]:.1%}"
            for k, row in enumerate(overall["head_accuracy"], start=1)
        ]
        lines.append(f"top-1 / top-5 accuracy on the answers: {', '.join(heads)}")
    return lines


def size_charts(sizes: Sequence[Json], chosen: int | None) -> list[Figure]:
    """Draw simulated tokens per step and tokens per second over the number of nodes, with a ring
    around the chosen size.
    """
    charts = [
        (
            "tokens_per_step",
            "Tokens per step over tree size",
            "From the tree's calibration. Simulated on answers that the tree was not fitted to. The"
            " ring marks the chosen size.",
        ),
        (
            "tokens_per_s",
            "Speed over tree size",
            "Those tokens per step over the measured step latency. Unlike the tokens per second"
            " above these are of the calibration's answers and without prefill.",
        ),
    ]
    ringed = [] if chosen is None else [chosen]
    drawn = []
    for key, title, caption in charts:
        points = [(size["nodes"], size[key]) for size in sizes if size[key] is not None]
        if points:
            curve = Curve("tree", points, ringed)
            drawing = curves([curve], title.lower(), "nodes", from_zero=False)
            drawn.append(Figure(title, drawing, caption))
    return drawn


def answers_section(answers: Sequence[Json]) -> PageSection:
    """Return all answers (lines of answers.jsonl) by category. Each accepted token is colored by
    its position in the draft.
    """
    answered = [answer for answer in answers if not answer.get("skipped")]
    categories: dict[str, list[Json]] = {}
    for answer in answered:
        categories.setdefault(answer["category"], []).append(_shown_answer(answer))
    heads = max(chain.from_iterable(answer["accepted"] for answer in answered), default=0)
    lines = []
    if heads:
        lines.append("Accepted tokens by their place in the draft of their step:")
    elif answered:
        lines.append("No draft token was accepted in these answers.")
    remarks = []
    skipped = len(answers) - len(answered)
    if skipped:
        remarks.append(
            f"{skipped} turns were skipped: prompt and answer do not fit the model's context."
        )
    return PageSection(
        "Answers",
        lines=lines,
        legend=[f"token {place}" for place in range(1, heads + 1)],
        answers=categories,
        remarks=remarks,
    )


def _shown_answer(answer: Json) -> Json:
    tokens, steps = answer["tokens"], answer["steps"]
    details = [f"turn {answer['turn']}", f"{tokens} tokens"]
    if steps:
        details += [f"{steps} steps", f"{(tokens - 1) / steps:.2f} tokens per step"]
    if answer.get("loops"):
        details.append("loops")
    scores = answer.get("scores")
    if scores:
        # whether the answer is correct, or why it is wrong; plain decoding's score if it differs
        shown = {
            name: "correct" if score["correct"] else f"wrong ({score['detail']})"
            for name, score in scores.items()
        }
        reported = "tree" if "tree" in scores else "plain"
        details.append(shown[reported])
        if scores["plain"]["correct"] != scores[reported]["correct"]:
            details.append(f"plain: {shown['plain']}")
    return {
        "summary": f"question {answer['question_id']}",
        "details": ", ".join(details),
        "asked": answer.get("asked"),
        "runs": colored_runs(answer),
    }


def colored_runs(answer: Json) -> list[tuple[int, str]]:
    """Split the text of an answer into runs of tokens that the same head proposed; return pairs of
    head number (0: target model) and text. The token that ended the answer is left out.
    """
    pieces = answer.get("pieces")
    if not pieces:
        return [(0, answer["text"])]
    if "".join(pieces[:-1]) == answer["text"]:
        pieces = pieces[:-1]
    pairs = zip(proposing_heads(len(pieces), answer["accepted"]), pieces, strict=True)
    runs = groupby(pairs, key=itemgetter(0))
    return [(head, "".join(piece for _, piece in run)) for head, run in runs]


def proposing_heads(tokens: int, accepted: Sequence[int]) -> list[int]:
    """Return which head proposed each token of an answer: k for head k, 0 for the target model.

    The first token comes from the prefill. Then each step adds its accepted tokens, proposed by
    heads 1, 2, ..., and one token of the target model.
    """
    heads = [0]
    for length in accepted:
        heads += [*range(1, length + 1), 0]
    return (heads + [0] * tokens)[:tokens]


#: Labels of `meta` keys whose names are not clear by themselves.
META_LABELS = {
    "chat_template_kwargs": "variables of the chat template",
    "weights": "digest of the heads",
    "packed": "prepacked weights",
    "compiled": "torch.compile",
    "early_stop": "early exit threshold of the draft",
    "plain_equal_generate": "plain answers equal to generate's",
    "exactness": "answers compared in",
    "resumed_turns": "turns measured before an interruption",
    "machine_load": "load of the machine",
    "other_cores": "cores that other processes used meanwhile",
    "plain_step_spread": "spread of equal plain steps",
    "seconds": "seconds in all",
    "baseline_tokens_per_s": "plain",
    "generate_tokens_per_s": "generate",
}


def meta_rows(meta: Json) -> list[tuple[str, str]]:
    """Return the label and text of every entry of `meta`, for the pages of a report."""
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
