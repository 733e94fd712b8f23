"""The report of an evaluation: report.json, and the tables, sentences and files made from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.answer_scores import LEAST_QUESTIONS, ROUGE
from medusa_train.evaluation.judge import model_answers
from medusa_train.evaluation.machine_load import busy_signs
from medusa_train.evaluation.metrics import by_category, metrics
from medusa_train.evaluation.report_page import html_page, sections_of
from medusa_train.evaluation.turns import Turn
from medusa_train.inference.decoding_mode import describe_mode, mode_of
from medusa_train.pages.page import Table, markdown_page, number, write_files
from medusa_train.tree_search.fit import node_acceptance
from medusa_train.trees.tree import Tree

Json = Mapping[str, Any]


def build_report(
    turns: Sequence[Turn],
    meta: Json,
    tree: Tree | None = None,
    parts: Json | None = None,
) -> dict[str, Any]:
    """Return the content of report.json.

    Returns:
        meta: the run, see `run_metadata`.
        overall, categories: the metrics of the whole benchmark, and of each of its categories.
        baselines: a copy of those in `overall`.
        tree, calibration: its paths with the acceptance of each, and how it was chosen.
        judge, rouge, joint: grades (None if nothing was judged), overlap with reference answers,
            and the target model before and after training.

    Args:
        meta: what was run, on which machine, and with which settings; plain JSON values.
        tree: the fixed tree; None if each step has its own tree.
        parts: entries of the report that were measured in addition to the turns, see above.
    """
    answered = [turn for turn in turns if not turn.skipped]
    overall = metrics(answered)
    report: dict[str, Any] = {
        "meta": meta,
        "overall": overall,
        "categories": by_category(answered),
        "baselines": overall["baselines"],
        "judge": None,
    }
    if tree is not None and tree.size:
        shares = node_acceptance([turn.trace for turn in answered if turn.trace is not None], tree)
        if shares is not None:
            paths = [list(path) for path in tree.paths]
            report["tree"] = {"medusa_choices": paths, "accepted": shares}
    return {**report, **(parts or {})}


def write_report(report: Json, turns: Sequence[Turn], directory: Path) -> list[Path]:
    """Write report.json, report.md, report.html, answers.jsonl and FastChat's
    model_answer/MODEL.jsonl.

    With heads, also write ranks.jsonl. Decoding with other trees can be simulated from it, see
    `Trace.ranks`.
    """
    answered = [turn for turn in turns if not turn.skipped]
    skipped = [turn for turn in turns if turn.skipped]
    answers = [_answer_line(turn) for turn in answered + skipped]
    tables = [metrics_table(report), decoders_table(report)]
    sections = sections_of(report, answers, tables, summary_of(report))
    name = model_id(report["meta"])
    files = {
        "report.json": report,
        "report.md": markdown_page(title_of(report), sections),
        "report.html": html_page(report, sections),
        "answers.jsonl": answers,
        f"model_answer/{name}.jsonl": model_answers(answered, name),
    }
    ranks = []
    for turn in answered:
        if turn.trace is not None:
            line: dict[str, Any] = {
                "question_id": turn.question_id,
                "turn": turn.turn,
                "ranks": turn.trace.ranks,
            }
            if turn.trace.confidence:
                line["confidence"] = turn.trace.confidence
            ranks.append(line)
    if ranks:
        files["ranks.jsonl"] = ranks
    return write_files(directory, files)


def model_id(meta: Json) -> str:
    """Return a short name of the model for file names and other tools."""
    return Path(meta["model"] or meta["base_model"]).resolve().name


def _answer_line(turn: Turn) -> dict[str, Any]:
    line = {
        "question_id": turn.question_id,
        "turn": turn.turn,
        "prompt_tokens": len(turn.prompt_ids),
    }
    if turn.skipped:
        return {**line, "skipped": True}
    answer = turn.answer
    return {
        **line,
        "category": turn.category,
        "asked": turn.asked,
        "text": turn.text,
        "pieces": turn.pieces,
        "tokens": len(answer.tokens),
        "steps": answer.steps,
        "accepted": answer.accepted,
        "loops": is_looping(answer.tokens),
        "seconds": {"tree": None} | {name: one.seconds for name, one in turn.answers.items()},
        "exact": turn.exact,
        "scores": {name: asdict(score) for name, score in turn.scores.items()},
    }


def terminal_report(report: Json) -> Group:
    """Return title, tables and summary for the terminal. The decoders' table is shown only if there
    are baselines other than plain decoding and `generate`.
    """
    tables = [metrics_table(report, left_out=SUMMARIZED)]
    if set(report["baselines"]) - {"plain", "generate"}:
        tables.append(decoders_table(report))
    lines = summary_of(report)
    if report["overall"]["overhead"] is not None:
        lines.append("Overhead: time of a step with the tree divided by time of a plain step.")
    return Group(Text(title_of(report), style="bold"), *tables, Text("\n".join(lines)))


# Tables


#: Columns that the summary's sentences also report. Without them the table fits 80 characters.
SUMMARIZED = ("answers", "correct", "loops")


def metrics_table(report: Json, left_out: Collection[str] = ()) -> Table:
    """Return one row per category, and last the overall row, unless there is only one category.

    Args:
        left_out: titles of columns that are not shown. Columns without a measured metric are never
            shown.
    """
    groups = dict(report["categories"])
    several = len(groups) != 1
    if several:
        groups["overall"] = report["overall"]
    rows = []
    for name, group in groups.items():
        shown = {title: cell for title, cell in cells(group).items() if title not in left_out}
        rows.append({"category": name, **shown})
    return Table.of_rows(rows, overall=several)


def cells(group: Json, intervals: Json | None = None) -> dict[str, str]:
    """Return the cells of a group of answers by the titles of their columns, with the given
    intervals. Metrics may be missing in older reports.
    """

    def cell(key: str, digits: int = 2, unit: str = "") -> str:
        return number(group.get(key), digits, unit, (intervals or {}).get(key))

    return {
        "answers": cell("answers", 0),
        "tokens per step": cell("acceleration_rate"),
        "overhead": cell("overhead"),
        "speedup": cell("speedup", 2, "x"),
        "over generate": cell("speedup_over_generate", 2, "x"),
        "tokens /s": cell("tokens_per_s", 0),
        "plain /s": cell("baseline_tokens_per_s", 0),
        "generate /s": cell("generate_tokens_per_s", 0),
        "equal fp32": _equal_cell(group),
        "equal bf16": _equal_cell(group, "_bf16"),
        "correct": _correct_cell(group.get("scores")),
        "loops": cell("looping_answers", 0),
    }


def _equal_cell(group: Json, suffix: str = "") -> str:
    """Format the number of equal answers out of the compared ones, with ties as "+n": in float32,
    or in bfloat16 with the suffix `_bf16`. "-" if they are missing, as in older reports.
    """
    num_equal = group.get(f"equal_answers{suffix}")
    if num_equal is None:
        return "-"
    ties = group.get("tie_answers") if not suffix else None
    shown = f"{num_equal}+{ties}" if ties else str(num_equal)
    return f"{shown}/{_compared_answers(group, suffix)}"


def _compared_answers(group: Json, suffix: str = "") -> int:
    """Return how many answers were compared. Older reports compared all answers."""
    return int(group.get(f"compared_answers{suffix}") or group["answers"])


def _correct_cell(scores: Json | None) -> str:
    """Format the number of correct answers out of the scored ones: the tree's number, and plain
    decoding's if it differs.
    """
    if scores is None:
        return "-"
    plain_correct = scores["plain"]["correct"]
    correct = scores.get("tree", scores["plain"])["correct"]
    cell = f"{correct}/{scores['answers']}"
    return cell if plain_correct == correct else f"{cell} (plain {plain_correct})"


def decoders_table(report: Json) -> Table:
    """Return the metrics of the tree and of all baselines on the whole benchmark."""
    overall = report["overall"]
    decoders: dict[str, Json] = {}
    if _has_tree(report):
        per_step = overall["acceleration_rate"]
        decoders["tree"] = {**overall, "tokens_per_step": per_step, "speedup": None}
    decoders |= report["baselines"]
    is_greedy = mode_of(report["meta"])["acceptance"] == "greedy"  # sampled answers differ anyway
    rows = [
        {
            "decoder": name.replace("_", " "),
            "tokens/s": number(row["tokens_per_s"], 0),
            "tokens per step": number(row["tokens_per_step"]),
            "tree's speedup over it": number(row["speedup"], 2, "x", row.get("speedup_interval")),
            "answers equal to plain ones": number(
                row.get("equal_to_plain") if is_greedy else None, 0
            ),
        }
        for name, row in decoders.items()
    ]
    return Table.of_rows(rows)


def _has_tree(report: Json) -> bool:
    """Return whether a tree was timed; False for a run with only baselines."""
    return report["overall"]["tokens_per_s"] is not None


# Sentences


def title_of(report: Json) -> str:
    """Return benchmark, model and dtype as a title, and the decoding mode if not the default."""
    meta = report["meta"]
    title = f"{meta['bench']}: {meta['model'] or meta['base_model']} in {meta['dtype']}"
    mode = describe_mode(mode_of(meta))
    return title if mode == describe_mode(mode_of({})) else f"{title}, {mode}"


def summary_of(report: Json) -> list[str]:
    """Summarize the report in sentences."""
    overall, meta = report["overall"], report["meta"]
    answers = f"{overall['answers']} answers, {overall['looping_answers']} of them with loops."
    if not _has_tree(report):
        return [f"{_why_no_tree(meta)} {answers}", *_machine_notes(report), _quality(report)]
    lines = [f"{_speed_note(overall)}; {_draft(meta)}; {answers}"]
    without_loops = overall["speedup_without_loops"]
    if overall["looping_answers"] and without_loops is not None:
        lines.append(f"Speedup without the answers with loops: {without_loops:.2f}x.")
    return [*lines, *_machine_notes(report), _output_note(report), _quality(report)]


def _speed_note(overall: Json) -> str:
    """Say how fast the tree is, relative to the faster of plain decoding and `generate`."""
    interval = overall["intervals"].get("speedup_over_fastest")
    speedup = number(overall["speedup_over_fastest"], 2, "x", interval)
    if "speedup_over_fastest" not in overall["intervals"]:
        speedup += f" (no interval: fewer than {LEAST_QUESTIONS} questions, or batches of them)"
    baseline = "the faster baseline" if "generate" in overall["baselines"] else "plain decoding"
    return f"{speedup} the speed of {baseline} (total tokens per second, prefill included)"


def _why_no_tree(meta: Json) -> str:
    """Say why there is no speedup."""
    if meta["heads"] is None:
        return "Baselines only: no draft heads were given."
    if meta["tree_nodes"] == 0:
        return (
            "No tree used, so no speedup: the tree is empty, since none was clearly faster than"
            " plain decoding where it was chosen."
        )
    return "Baselines only: nothing was drafted; the heads' guesses are along these answers."


def _machine_notes(report: Json) -> list[str]:
    """Say why the times are doubtful: signs of a busy machine, or an overhead below 1."""
    load = report["meta"].get("machine_load")
    signs = busy_signs(**load) if load is not None else []
    overhead = report["overall"]["overhead"]
    if overhead is not None and overhead < 1:
        signs.append(
            f"overhead {overhead:.2f}, though a step with a tree costs no less than a plain one"
        )
    if not signs:
        return []
    return [
        f"The machine seems to have been busy: {'; '.join(signs)}. Times are uncertain: measure"
        " again while nothing else runs."
    ]


def _draft(meta: Json) -> str:
    """Say what drafts."""
    parts = []
    dynamic = meta.get("dynamic_trees")
    if dynamic is not None:
        size, depth = _counted(dynamic["size"], "node"), dynamic["depth"]
        parts.append(f"dynamic trees of {size}, up to {depth} deep")
    elif meta["heads"] is not None:
        nodes = _counted(meta["tree_nodes"], "node")
        heads = _counted(meta["heads"], "head")
        parts.append(f"tree of {nodes}, {heads}")
    if meta.get("draft") is not None:
        parts.append(f"draft {meta['draft']}")
    return ", ".join(parts)


def _output_note(report: Json) -> str:
    """Say how the output relates to the output of plain decoding."""
    output = _OUTPUT.get(mode_of(report["meta"])["acceptance"])
    if output is None:
        outcomes = report["meta"].get("exactness") or {}
        notes = [_equality_note(report["overall"], dtype, outcomes.get(dtype)) for dtype in _DTYPES]
        output = f"{'; '.join(notes)}."
    return f"Output: {output} Speed was measured in {report['meta']['dtype']}."


_DTYPES = {"float32": "", "bfloat16": "_bf16"}  # values: the suffix of each dtype's metrics
_OUTPUT = {
    "sampling": (
        "samples, lossless in distribution: whatever the draft, tokens follow the model's own"
        " distribution. This is a property of the method, held by the project's tests; single"
        " answers differ from the baselines'."
    ),
    "typical": (
        "typical acceptance changes the distribution: it accepts draft tokens that the model finds"
        " plausible. The baselines sample from the model's distribution at the same temperature;"
        " also compare the answers' quality."
    ),
}


def _equality_note(overall: Json, dtype: str, outcome: str | None) -> str:
    num_equal = overall[f"equal_answers{_DTYPES[dtype]}"]
    if num_equal is None:
        has_reason = outcome not in (None, "not compared", "compared")
        return f"{dtype}: not compared" + (f" ({outcome})" if has_reason else "")
    count = _compared_answers(overall, _DTYPES[dtype])
    note = f"{dtype}: {num_equal} of {count}"
    if count < overall["answers"]:
        note += f" (drawn at random from {overall['answers']})"
    if dtype == "bfloat16":
        if num_equal < count:
            note += ", since its rounding changes which of two nearly equal logits is larger"
        return note
    note += " answers equal plain decoding's token for token"
    ties = overall["tie_answers"]
    if ties:
        note += f", {ties} first differ at a tie (logits within 1e-4)"
    if num_equal + ties < count:
        note += f", {count - num_equal - ties} differ without a tie"
    return note


def _quality(report: Json) -> str:
    """Say how good the answers are: scores, grades, and after joint training the change in
    perplexity.
    """
    parts = []
    scores = report["overall"]["scores"]
    if scores is not None:
        parts.append(_scores_text(scores))
    rouge = report.get("rouge")
    if rouge is not None:
        parts.append(_rouge_text(rouge))
    joint = report.get("joint")
    if joint is not None:
        change = joint["perplexity_after"] / joint["perplexity_before"] - 1
        parts.append(
            f"perplexity {joint['perplexity_after']:.3f} after joint training,"
            f" {joint['perplexity_before']:.3f} before ({change:+.1%}), KL {joint['kl']:.4f} nats"
            " per token"
        )
    if report["judge"] is not None:
        parts.append(_grades_text(report["judge"]))
    elif scores is None and rouge is None:
        parts.append("not judged")
    return f"Quality: {'; '.join(parts)}."


def _rouge_text(rouge: Json) -> str:
    """Say how close the answers are to the references."""
    means = {}
    for name in ("tree", "plain"):
        if name in rouge:
            means[name] = "/".join(f"{rouge[name][kind]:.2f}" for kind in ROUGE)
    count = _counted(rouge["answers"], "answer")
    shown = ", plain decoding ".join(means.values())
    return f"ROUGE-1/2/L {shown} (F1 in % of {count} with a reference)"


def _grades_text(judged: Json) -> str:
    """Say how a judge graded the answers."""
    if judged["score"] is None:
        reason = judged.get("reason", "no grade in its replies")
        return f"{judged['model']} graded no answer ({reason})"
    graded = f"{judged['graded']} answers"
    num_missing = judged["without_grade"] + judged["failed"]
    if num_missing:
        graded += f", {num_missing} without a grade"
    return f"{judged['score']:.2f} of 10 by {judged['model']} ({graded})"


def _scores_text(scores: Json) -> str:
    """Say how many answers are correct, and whether plain decoding's scores are the same."""

    def rate(name: str) -> str:
        score = scores[name]
        interval = f"no interval: fewer than {LEAST_QUESTIONS} answers"
        if score["interval"] is not None:
            interval = "95 % interval {:.1%} to {:.1%}".format(*score["interval"])
        return f"{score['correct']} of {scores['answers']} ({score['rate']:.1%}, {interval})"

    if "tree" not in scores:
        return f"{scores['metric']} {rate('plain')}"
    text = f"{scores['metric']} {rate('tree')}, with plain decoding"
    if not scores["differing"]:
        return f"{text} equal on every question"
    return f"{text} {rate('plain')}; {_counted(scores['differing'], 'question')} scored differently"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
