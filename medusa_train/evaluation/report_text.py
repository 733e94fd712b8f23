"""The figures of a finished evaluation, and the sentences that explain them in every form of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_train.evaluation.decoding_mode import describe_settings, settings_of
from medusa_train.evaluation.metrics import Figures, by_category, node_acceptance, summarize
from medusa_train.evaluation.records import TurnRecord
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Report:
    """A finished evaluation.

    Attributes:
        meta: what was run, on what and with what; plain JSON values.
        overall: figures of the whole bench.
        categories: figures per category.
        extra: further parts of report.json: `judge` (grades; None if nothing was judged), `joint` (perplexity of the
            backbone before and after joint training), `tree` (its paths and each path's acceptance) and `calibration`
            (how the tree was chosen, from tree.json).
    """

    meta: dict[str, Any]
    overall: Figures
    categories: dict[str, Figures]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls,
        records: Sequence[TurnRecord],
        meta: dict[str, Any],
        tree: Tree | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Report:
        """Compute the figures of `records`."""
        parts: dict[str, Any] = {"judge": None}
        if tree is not None and tree.size:
            shares = node_acceptance([record.trace for record in records if record.trace is not None], tree)
            parts["tree"] = {"medusa_choices": [list(path) for path in tree.paths], "accepted": shares}
        return cls(meta, summarize(records), by_category(records), {**parts, **(extra or {})})

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

    @property
    def is_greedy(self) -> bool:
        """Whether answers of different decoders should be equal."""
        return bool(settings_of(self.meta)["acceptance"] == "greedy")


def title_of(report: Report) -> str:
    """Return bench, model and dtype as a title, and the mode if it is not the default."""
    meta, mode = report.meta, describe_settings(settings_of(report.meta))
    title = f"{meta['bench']}: {meta['model'] or meta['base_model']} in {meta['dtype']}"
    return title if mode == describe_settings(settings_of({})) else f"{title}, {mode}"


def summary_of(report: Report) -> str:
    """Summarize the report in words, one sentence per line."""
    overall, meta = report.overall, report.meta
    answers = f"{overall['answers']} answers, {overall['looping_answers']} of them with loops."
    if not report.has_tree:
        return f"Baselines only: no draft heads were given. {answers}\n{_quality(report)}"
    ratio = overall["speedup_over_fastest"]
    speedup = "-" if ratio is None else f"{ratio:.2f}x{_interval(overall, 'speedup_over_fastest')}"
    lines = [
        f"{speedup} the speed of the faster baseline (total tokens per second, prefill included); "
        f"{_draft(meta)}; {answers}"
    ]
    if overall["looping_answers"] and overall["speedup_without_loops"] is not None:
        lines.append(f"Speedup without the answers with loops: {overall['speedup_without_loops']:.2f}x.")
    for name, baseline in overall["baselines"].items():
        if name not in ("plain", "generate") and baseline["speedup"] is not None:
            lines.append(
                f"{baseline['speedup']:.2f}x{_bounds(baseline['speedup_interval'])} the speed of "
                f"{name.replace('_', ' ')} "
                f"({baseline['tokens_per_s']:.0f} tokens/s{_per_step(baseline)}"
                f"{_equal_to_plain(report, baseline, '; ')})."
            )
    return "\n".join([*lines, *notes(report), _quality(report)])


def _draft(meta: Mapping[str, Any]) -> str:
    """Say what proposed the guesses."""
    parts = []
    if (dynamic := meta.get("dynamic_trees")) is not None:
        used, nodes = len(dynamic["temperatures"]), dynamic["sizes"][-1]["nodes"]
        parts.append(
            f"dynamic trees of up to {nodes} nodes, {used} of {_count(meta['heads'], 'head')}"
            if used
            else "dynamic trees, which decode without heads here"
        )
    elif meta["heads"] is not None:
        parts.append(f"tree of {_count(meta['tree_nodes'], 'node')}, {_count(meta['heads'], 'head')}")
    if meta.get("draft") is not None:
        parts.append(f"draft {meta['draft']}")
    return ", ".join(parts)


def notes(report: Report) -> list[str]:
    """Say how the output relates to plain decoding's, and what "tokens per step" means here; empty without a tree.

    Every form of the report shows these sentences beside its figures.
    """
    if not report.has_tree:
        return []
    return [_output_note(report), _tokens_per_step_note(report)]


def _output_note(report: Report) -> str:
    overall, outcomes = report.overall, report.meta.get("exactness") or {}
    acceptance = settings_of(report.meta)["acceptance"]
    if acceptance != "greedy":
        return f"Output: {_OUTPUT[acceptance]} Speed was measured in {report.meta['dtype']}."
    equal, ties, count = overall["equal_answers"], overall["tie_answers"] or 0, overall["answers"]
    if equal is None:
        float32 = f"float32: {_not_compared(outcomes.get('float32'))}"
    else:
        float32 = f"float32: {equal} of {count} answers equal plain decoding's token for token"
        if ties:
            float32 += f", {ties} first differ at a tie (logits within 1e-4)"
        if different := count - equal - ties:
            float32 += f", {different} differ without a tie"
    equal = overall["equal_answers_bf16"]
    if equal is None:
        bfloat16 = f"bfloat16: {_not_compared(outcomes.get('bfloat16'))}"
    else:
        bfloat16 = f"bfloat16: {equal} of {count}"
        if equal < count:
            bfloat16 += ", since its rounding changes which of two nearly equal logits is larger"
    return f"Output: {float32}; {bfloat16}. Speed was measured in {report.meta['dtype']}."


_OUTPUT = {
    "sampling": "samples, lossless in distribution: whatever the draft, tokens follow the model's own distribution. "
    "This is a property of the method, held by the project's tests; single answers differ from the baselines'.",
    "typical": "typical acceptance changes the distribution: it accepts draft tokens that the model finds plausible. "
    "The baselines sample from the model's distribution at the same temperature; compare the answers' quality, too.",
}


def _not_compared(outcome: str | None) -> str:
    return f"not compared ({outcome})" if outcome not in (None, "not compared", "compared") else "not compared"


def _tokens_per_step_note(report: Report) -> str:
    if report.meta.get("draft") is not None:
        note = f"Tokens per step: measured on this bench with the draft {report.meta['draft']}."
        parts = " The heads alone and the lookup alone were measured in turns with it."
        return note + parts if "heads_alone" in report.overall["baselines"] else note
    if report.meta.get("dynamic_trees") is not None:
        return (
            "Tokens per step: measured on this bench, with a tree of its own in every step. The fixed trees of the "
            "same heads were measured in turns with it."
        )
    calibration = report.extra.get("calibration") or {}
    expected = calibration.get("tokens_per_step")
    estimate = "estimate" if expected is None else f"{expected:.2f}"
    return (
        "Tokens per step: measured on this bench with this tree. Training's validation figure is simulated on held-out "
        f"text, and tree.json's {estimate} on the answers of its calibration, so they differ."
    )


def _quality(report: Report) -> str:
    """Say how good the answers are: correct ones, grades, and perplexity where joint training changed it."""
    parts = []
    if (scores := report.overall["scores"]) is not None:
        parts.append(_scores_text(scores))
    if (joint := report.extra.get("joint")) is not None:
        change = joint["perplexity_after"] / joint["perplexity_before"] - 1
        parts.append(
            f"perplexity {joint['perplexity_after']:.3f} after joint training, {joint['perplexity_before']:.3f} before "
            f"({change:+.1%}), KL {joint['kl']:.4f} nats per token"
        )
    judged = report.extra.get("judge")
    if judged is None:
        if scores is None:
            parts.append("not judged")
    elif judged["score"] is None:
        parts.append(
            f"{judged['model']} graded none of the answers ({judged.get('reason', 'no grade in its replies')})"
        )
    else:
        missing = judged["without_grade"] + judged["failed"]
        graded = f"{judged['graded']} answers" + (f", {missing} without a grade" if missing else "")
        parts.append(f"{judged['score']:.2f} of 10 by {judged['model']} ({graded})")
    return f"Quality: {'; '.join(parts)}."


def _scores_text(scores: Mapping[str, Any]) -> str:
    """Say how many answers are correct, and whether plain decoding's scores are the same."""

    def rate(name: str) -> str:
        score, (low, high) = scores[name], scores[name]["interval"]
        share = f"{score['rate']:.1%}, 95 % interval {low:.1%} to {high:.1%}"
        return f"{score['correct']} of {scores['answers']} ({share})"

    if "tree" not in scores:
        return f"{scores['metric']} {rate('plain')}"
    text = f"{scores['metric']} {rate('tree')}"
    if not scores["differing"]:
        return f"{text}, with plain decoding equal on every question"
    return f"{text}, with plain decoding {rate('plain')}; {_count(scores['differing'], 'question')} scored differently"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _interval(figures: Figures, key: str) -> str:
    return _bounds(figures["intervals"].get(key))


def _bounds(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.2f}-{interval[1]:.2f})"


def _equal_to_plain(report: Report, baseline: Mapping[str, Any], separator: str) -> str:
    """Say how many answers of a baseline equal the plain ones; empty where they are samples."""
    if not report.is_greedy:
        return ""
    return f"{separator}{baseline['equal_to_plain']}/{report.overall['answers']} answers equal to plain ones"


def _per_step(baseline: Mapping[str, Any]) -> str:
    """Write the tokens per step of a baseline; empty where it does not report its steps."""
    rate = baseline.get("tokens_per_step")
    return "" if rate is None else f", {rate:.2f} tokens per step"


def further_figures(report: Report) -> list[str]:
    """List the figures of the whole bench that have no column."""
    overall = report.overall
    lines = [
        f"- {name.replace('_', ' ')}: {baseline['tokens_per_s']:.0f} tokens/s{_per_step(baseline)}"
        + ("" if baseline["speedup"] is None else f", speedup {baseline['speedup']:.2f}x")
        + _equal_to_plain(report, baseline, ", ")
        for name, baseline in overall["baselines"].items()
        if baseline["tokens_per_s"] is not None
    ]
    for key, label, scale, digits in (
        ("mean_speedup", "mean of the speedups per question", 1, 2),
        ("time_to_first_token_s", "milliseconds to the first token", 1000, 1),
    ):
        if overall[key] is not None:
            lines.append(f"- {label}: {overall[key] * scale:.{digits}f}")
    if rates := overall["chain_rates"]:
        values = ", ".join(f"{k}: {rate:.2f}" for k, rate in enumerate(rates, start=1))
        lines.append(f"- tokens per step with the chain of the first k heads' top-1 guesses (simulated), k = {values}")
    if shares := overall["ctar"]:
        values = ", ".join(f"{w}: {share:.1%}" for w, share in enumerate(shares, start=1))
        lines.append(f"- CTAR(w), steps that accepted at least w draft tokens: {values}")
    if table := overall["head_accuracy"]:
        values = ", ".join(f"head {k}: {row[0]:.1%} / {row[4]:.1%}" for k, row in enumerate(table, start=1))
        lines.append(f"- top-1 / top-5 accuracy on the answers: {values}")
    return lines


def definitions(report: Report) -> list[str]:
    """Define the terms of the table, as list items of report.md."""
    settings = settings_of(report.meta)
    how = "" if report.is_greedy else f" All baselines sample at temperature {settings['temperature']:g}."
    lines = [f"- **plain**: the same decoding loop with the empty tree. **generate**: transformers' `generate`.{how}"]
    if settings["batch_size"] > 1:
        lines.append(
            f"- **batches**: {settings['batch_size']} questions in the same passes, for every decoder. Complete "
            "answers leave a batch, and the next batch starts when all are; a step is a pass over the whole batch."
        )
    if report.has_tree:
        per_row = " of each answer" if settings["batch_size"] > 1 else ""
        lines += [
            f"- **tokens per step** (acceleration rate): over decoding steps{per_row}; the first token comes from the "
            "prefill.",
            "- **overhead**: latency of a step with the tree over that of a plain step, prefill excluded.",
            "- **speedup**: total tokens per second with the tree over plain, prefill included. Intervals in brackets "
            "are 95 % bootstrap intervals over questions.",
        ]
    if report.has_tree and report.is_greedy:
        lines += [
            "- **equal fp32, bf16**: answers equal to the plain ones token for token, in float32 and in bfloat16; "
            "+n counts ties, which first differ where the two best logits lie within 1e-4.",
        ]
    if report.overall["scores"] is not None:
        lines.append(
            "- **correct**: answers whose number equals the reference (exact match) or whose code passes its tests "
            "(pass@1). Intervals of these rates are 95 % Wilson intervals."
        )
    lines.append("- **loops**: answers that hold an 8-token sequence three times or more; loops inflate a speedup.")
    return lines
