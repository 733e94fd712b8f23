"""The report of an evaluation: its figures, the tables and sentences that show them, and its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.answer_scores import LEAST_QUESTIONS, ROUGE
from medusa_train.evaluation.judge import model_answers
from medusa_train.evaluation.machine_load import MachineLoad
from medusa_train.evaluation.metrics import Metrics, by_category, metrics
from medusa_train.evaluation.report_page import html_page, sections_of
from medusa_train.evaluation.turns import Turn
from medusa_train.inference.decoding_mode import describe_mode, mode_of
from medusa_train.pages.page import Table, markdown_page, number, write_files
from medusa_train.tree_search.fit import Trace, node_acceptance
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Report:
    """A finished evaluation.

    Attributes:
        meta: what was run, on what and with what; plain JSON values.
        overall, categories: figures of the whole bench, and per category.
        extra: `judge` (grades; None if nothing was judged), `rouge`, `joint` (the backbone before
            and after training), `tree` (its paths and each one's acceptance) and `calibration` (how
            the tree was chosen, from tree.json).
    """

    meta: dict[str, Any]
    overall: Metrics
    categories: dict[str, Metrics]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls,
        records: Sequence[Turn],
        meta: dict[str, Any],
        tree: Tree | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Report:
        """Compute the figures of `records`."""
        parts: dict[str, Any] = {"judge": None}
        if tree is not None and tree.size:
            traces = [record.trace for record in records if record.trace is not None]
            shares = node_acceptance(traces, tree)
            if shares is not None:
                parts["tree"] = {
                    "medusa_choices": [list(path) for path in tree.paths],
                    "accepted": shares,
                }
        parts.update(extra or {})
        return cls(meta, metrics(records), by_category(records), parts)

    def as_json(self) -> dict[str, Any]:
        """Return the content of report.json; `baselines` also stand at the top level."""
        return {
            "meta": self.meta,
            "overall": self.overall,
            "categories": self.categories,
            "baselines": self.overall["baselines"],
            **self.extra,
        }

    @property
    def has_tree(self) -> bool:
        """False for a baseline-only run."""
        return self.overall["tokens_per_s"] is not None


def write_report(report: Report, turns: Sequence[Turn], directory: Path) -> list[Path]:
    """Write report.json, report.md, report.html, answers.jsonl and FastChat's
    model_answer/MODEL.jsonl.

    With heads also ranks.jsonl, from which decoding with other trees can be simulated, see
    `Trace.ranks`.
    """
    # 1. one line per turn, the skipped ones last
    records = [turn for turn in turns if not turn.skipped]
    answers = [_answer_line(record) for record in records]
    for turn in turns:
        if turn.skipped:
            answers.append(
                {
                    "question_id": turn.question_id,
                    "turn": turn.turn,
                    "prompt_tokens": len(turn.prompt_ids),
                    "skipped": True,
                }
            )
    ranks = [_ranks_line(record, record.trace) for record in records if record.trace is not None]

    # 2. the pages
    content = report.as_json()
    tables = [figures_table(report), decoders_table(report)]
    sections = sections_of(content, answers, tables, summary_of(report))
    files = {
        "report.json": content,
        "report.md": markdown_page(title_of(report), sections),
        "report.html": html_page(content, sections),
        "answers.jsonl": answers,
    }
    if ranks:
        files["ranks.jsonl"] = ranks
    name = model_id(report.meta)
    files[f"model_answer/{name}.jsonl"] = model_answers(records, name)
    return write_files(directory, files)


def _ranks_line(record: Turn, trace: Trace) -> dict[str, Any]:
    line: dict[str, Any] = {
        "question_id": record.question_id,
        "turn": record.turn,
        "ranks": trace.ranks,
    }
    if trace.confidence:
        line["confidence"] = trace.confidence
    return line


def model_id(meta: Mapping[str, Any]) -> str:
    """Return a short name of the model for file names and other tools."""
    return Path(meta["model"] or meta["base_model"]).resolve().name


def _answer_line(record: Turn) -> dict[str, Any]:
    answer = record.answer
    seconds = {"tree": None} | {name: one.seconds for name, one in record.answers.items()}
    return {
        "question_id": record.question_id,
        "category": record.category,
        "turn": record.turn,
        "asked": record.asked,
        "text": record.text,
        "pieces": list(record.pieces),
        "prompt_tokens": len(record.prompt_ids),
        "tokens": len(answer.tokens),
        "steps": answer.steps,
        "accepted": list(answer.accepted),
        "loops": is_looping(answer.tokens),
        "seconds": seconds,
        "exact": {dtype: verdict.value for dtype, verdict in record.exact.items()},
        "scores": {name: asdict(score) for name, score in record.scores.items()},
    }


def terminal_report(report: Report) -> Group:
    """Return title, tables and summary for the terminal; further decoders than plain and `generate`
    have a table.
    """
    tables = [figures_table(report, left_out=SUMMARIZED)]
    if set(report.overall["baselines"]) - {"plain", "generate"}:
        tables.append(decoders_table(report))
    return Group(
        Text(title_of(report), style="bold"),
        *(table.terminal(padding=0) for table in tables),
        Text("\n".join([*summary_of(report), *_terms_of(report)])),
    )


def _terms_of(report: Report) -> list[str]:
    """Explain the figure that readers ask for most, where it is shown."""
    if report.overall["overhead"] is None:
        return []
    return ["Overhead: time of a step with the tree divided by time of a plain step."]


# Tables


#: Columns that the summary's sentences repeat; without them the table fits 80 characters.
SUMMARIZED = ("answers", "correct", "loops")


def _cells(figures: Metrics) -> dict[str, str]:
    """Return the cells of a category by the titles of their columns."""
    return {
        "answers": number(figures["answers"], 0),
        "tokens per step": number(figures["acceleration_rate"]),
        "overhead": number(figures["overhead"]),
        "speedup": number(figures["speedup"], 2, "x"),
        "over generate": number(figures["speedup_over_generate"], 2, "x"),
        "tokens /s": number(figures["tokens_per_s"], 0),
        "plain /s": number(figures["baseline_tokens_per_s"], 0),
        "generate /s": number(figures["generate_tokens_per_s"], 0),
        "equal fp32": equal_cell(figures),
        "equal bf16": _equal_bf16_cell(figures),
        "correct": _correct_cell(figures),
        "loops": number(figures["looping_answers"], 0),
    }


def equal_cell(figures: Metrics) -> str:
    """Format equal answers in float32 out of those compared, with ties as "+n"; older reports lack
    them.
    """
    equal = figures.get("equal_answers")
    ties = figures.get("tie_answers")
    if equal is None:
        return "-"
    if ties:
        return f"{equal}+{ties}/{compared_answers(figures)}"
    return f"{equal}/{compared_answers(figures)}"


def _equal_bf16_cell(figures: Metrics) -> str:
    equal = figures["equal_answers_bf16"]
    if equal is None:
        return "-"
    return f"{equal}/{compared_answers(figures, '_bf16')}"


def compared_answers(figures: Metrics, suffix: str = "") -> int:
    """Return how many answers were compared in float32 (`_bf16`: bfloat16); older reports compared
    all.
    """
    return int(figures.get(f"compared_answers{suffix}") or figures["answers"])


def _correct_cell(figures: Metrics) -> str:
    """Format correct answers out of those scored: the tree's, and plain decoding's if their number
    differs.
    """
    scores = figures["scores"]
    if scores is None:
        return "-"
    plain = scores["plain"]["correct"]
    correct = scores.get("tree", scores["plain"])["correct"]
    cell = f"{correct}/{scores['answers']}"
    if plain != correct:
        cell += f" (plain {plain})"
    return cell


def figures_table(report: Report, left_out: Collection[str] = ()) -> Table:
    """Return one row per category, the overall row last unless it would repeat the only one.

    Args:
        left_out: titles of columns that are not shown; those without a measured figure never are.
    """
    groups = dict(report.categories)
    several = len(groups) != 1
    if several:
        groups["overall"] = report.overall
    cells = [_cells(figures) for figures in groups.values()]
    columns = {"category": list(groups)}
    for title in cells[0]:
        if title not in left_out:
            columns[title] = [cells_of_group[title] for cells_of_group in cells]
    return Table.of_columns(columns, overall=several)


def decoders_table(report: Report) -> Table:
    """Return the tree and all baselines on the whole bench."""
    overall = report.overall
    decoders: dict[str, Metrics] = {}
    if report.has_tree:
        decoders["tree"] = {
            "tokens_per_s": overall["tokens_per_s"],
            "tokens_per_step": overall["acceleration_rate"],
            "speedup": None,
            "speedup_interval": None,
        }
    for name, figures in overall["baselines"].items():
        decoders[name.replace("_", " ")] = figures
    rows = decoders.values()
    columns = {
        "decoder": list(decoders),
        "tokens/s": [number(figures["tokens_per_s"], 0) for figures in rows],
        "tokens per step": [number(figures["tokens_per_step"]) for figures in rows],
        "tree's speedup over it": [
            number(figures["speedup"], 2, "x", figures["speedup_interval"]) for figures in rows
        ],
    }
    if mode_of(report.meta)["acceptance"] == "greedy":  # other answers are samples
        columns["answers equal to plain ones"] = [
            number(figures.get("equal_to_plain"), 0) for figures in rows
        ]
    return Table.of_columns(columns)


# Sentences


def title_of(report: Report) -> str:
    """Return bench, model and dtype as a title, and the mode if it is not the default."""
    meta = report.meta
    title = f"{meta['bench']}: {meta['model'] or meta['base_model']} in {meta['dtype']}"
    mode = describe_mode(mode_of(meta))
    if mode == describe_mode(mode_of({})):
        return title
    return f"{title}, {mode}"


def summary_of(report: Report) -> list[str]:
    """Summarize the report in sentences."""
    overall = report.overall
    answers = f"{overall['answers']} answers, {overall['looping_answers']} of them with loops."
    if not report.has_tree:
        lines = [f"{_why_no_tree(report.meta)} {answers}"]
    else:
        lines = [f"{_speed_note(overall)}; {_draft(report.meta)}; {answers}"]
        without_loops = overall["speedup_without_loops"]
        if overall["looping_answers"] and without_loops is not None:
            lines.append(f"Speedup without the answers with loops: {without_loops:.2f}x.")
    lines += _machine_notes(report)
    if report.has_tree:
        lines.append(_output_note(report))
    lines.append(_quality(report))
    return lines


def _speed_note(overall: Metrics) -> str:
    """Say how fast the tree is, beside the fastest of plain decoding and `generate`."""
    interval = overall["intervals"].get("speedup_over_fastest")
    speedup = number(overall["speedup_over_fastest"], 2, "x", interval)
    if "speedup_over_fastest" not in overall["intervals"]:
        speedup += f" (no interval: fewer than {LEAST_QUESTIONS} questions, or batches of them)"
    baseline = "plain decoding"
    if "generate" in overall["baselines"]:
        baseline = "the faster baseline"
    return f"{speedup} the speed of {baseline} (total tokens per second, prefill included)"


def _why_no_tree(meta: Mapping[str, Any]) -> str:
    """Say why there is no speedup."""
    if meta["heads"] is None:
        return "Baselines only: no draft heads were given."
    if meta["tree_nodes"] == 0:
        return (
            "No tree used, so no speedup: the tree is empty, since none was clearly faster than"
            " plain decoding where it was chosen."
        )
    return "Baselines only: nothing was drafted; the heads' guesses are along these answers."


def _machine_notes(report: Report) -> list[str]:
    """Say what makes the times doubtful: signs of a busy machine, and an overhead below 1."""
    load = report.meta.get("machine_load")
    signs = []
    if load is not None:
        signs = MachineLoad(**load).signs()
    overhead = report.overall["overhead"]
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


def _draft(meta: Mapping[str, Any]) -> str:
    """Say what proposed the guesses."""
    parts = []
    dynamic = meta.get("dynamic_trees")
    if dynamic is not None:
        nodes = _counted(dynamic["size"], "node")
        parts.append(f"dynamic trees of {nodes}, up to {dynamic['depth']} deep")
    elif meta["heads"] is not None:
        nodes = _counted(meta["tree_nodes"], "node")
        parts.append(f"tree of {nodes}, {_counted(meta['heads'], 'head')}")
    if meta.get("draft") is not None:
        parts.append(f"draft {meta['draft']}")
    return ", ".join(parts)


def _output_note(report: Report) -> str:
    """Say how the output relates to plain decoding's."""
    acceptance = mode_of(report.meta)["acceptance"]
    if acceptance == "greedy":
        outcomes = report.meta.get("exactness") or {}
        float32 = _float32_note(report.overall, outcomes.get("float32"))
        bfloat16 = _bfloat16_note(report.overall, outcomes.get("bfloat16"))
        output = f"float32: {float32}; bfloat16: {bfloat16}."
    else:
        output = _OUTPUT[acceptance]
    return f"Output: {output} Speed was measured in {report.meta['dtype']}."


def _float32_note(overall: Metrics, outcome: str | None) -> str:
    equal = overall["equal_answers"]
    if equal is None:
        return _not_compared(outcome)
    count = compared_answers(overall)
    ties = overall["tie_answers"]
    different = count - equal - ties
    note = f"{equal} of {count} answers equal plain decoding's token for token"
    if ties:
        note += f", {ties} first differ at a tie (logits within 1e-4)"
    if different:
        note += f", {different} differ without a tie"
    return note


def _bfloat16_note(overall: Metrics, outcome: str | None) -> str:
    equal = overall["equal_answers_bf16"]
    if equal is None:
        return _not_compared(outcome)
    count = compared_answers(overall, "_bf16")
    note = f"{equal} of {count}"
    if equal < count:
        note += ", since its rounding changes which of two nearly equal logits is larger"
    return note


_OUTPUT = {
    "sampling": (
        "samples, lossless in distribution: whatever the draft, tokens follow the model's own"
        " distribution. This is a property of the method, held by the project's tests; single"
        " answers differ from the baselines'."
    ),
    "typical": (
        "typical acceptance changes the distribution: it accepts draft tokens that the model finds"
        " plausible. The baselines sample from the model's distribution at the same temperature;"
        " compare the answers' quality, too."
    ),
}


def _not_compared(outcome: str | None) -> str:
    if outcome in (None, "not compared", "compared"):
        return "not compared"
    return f"not compared ({outcome})"


def _quality(report: Report) -> str:
    """Say how good the answers are: correct ones, grades, and perplexity where joint training
    changed it.
    """
    parts = []
    scores = report.overall["scores"]
    if scores is not None:
        parts.append(_scores_text(scores))
    rouge = report.extra.get("rouge")
    if rouge is not None:
        parts.append(_rouge_text(rouge))
    joint = report.extra.get("joint")
    if joint is not None:
        change = joint["perplexity_after"] / joint["perplexity_before"] - 1
        parts.append(
            f"perplexity {joint['perplexity_after']:.3f} after joint training,"
            f" {joint['perplexity_before']:.3f} before ({change:+.1%}), KL {joint['kl']:.4f} nats"
            " per token"
        )
    judged = report.extra.get("judge")
    if judged is not None:
        parts.append(_grades_text(judged))
    elif scores is None and rouge is None:
        parts.append("not judged")
    return f"Quality: {'; '.join(parts)}."


def _rouge_text(rouge: Mapping[str, Any]) -> str:
    """Say how close the answers are to the references."""

    def means(name: str) -> str:
        return "/".join(f"{rouge[name][kind]:.2f}" for kind in ROUGE)

    count = _counted(rouge["answers"], "answer")
    shown = means("plain")
    if "tree" in rouge:
        shown = f"{means('tree')}, plain decoding {means('plain')}"
    return f"ROUGE-1/2/L {shown} (F1 in % of {count} with a reference)"


def _grades_text(judged: Mapping[str, Any]) -> str:
    """Say how a judge graded the answers."""
    if judged["score"] is None:
        reason = judged.get("reason", "no grade in its replies")
        return f"{judged['model']} graded no answer ({reason})"
    graded = f"{judged['graded']} answers"
    missing = judged["without_grade"] + judged["failed"]
    if missing:
        graded += f", {missing} without a grade"
    return f"{judged['score']:.2f} of 10 by {judged['model']} ({graded})"


def _scores_text(scores: Mapping[str, Any]) -> str:
    """Say how many answers are correct, and whether plain decoding's scores are the same."""

    def rate(name: str) -> str:
        score = scores[name]
        share = f"{score['rate']:.1%}"
        if score["interval"] is None:
            share += f", no interval: fewer than {LEAST_QUESTIONS} answers"
        else:
            low, high = score["interval"]
            share += f", 95 % interval {low:.1%} to {high:.1%}"
        return f"{score['correct']} of {scores['answers']} ({share})"

    if "tree" not in scores:
        return f"{scores['metric']} {rate('plain')}"
    text = f"{scores['metric']} {rate('tree')}"
    if not scores["differing"]:
        return f"{text}, with plain decoding equal on every question"
    return (
        f"{text}, with plain decoding {rate('plain')}; {_counted(scores['differing'], 'question')}"
        " scored differently"
    )


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"
