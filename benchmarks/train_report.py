"""What `train.py` found, as JSON, as Markdown tables with the bars that were set, and as a plot. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import sentence
from train_case import Case, Result

NAMES = {
    "medusa1": "heads alone",
    "medusa2": "joint, LoRA",
    "shape1": "Medusa-1, frozen backbone in bfloat16",
    "shape2": "Medusa-2, QLoRA (NF4)",
}
SAMPLES, EPOCHS = 60_000, 2  # of the paper's run on ShareGPT, which took it 5 hours on one A100 (Medusa-1, 7B)
SAMPLE_TOKENS = 1_500  # what a ShareGPT conversation is taken to have on average, cut at the sequence length


@dataclass(frozen=True)
class Measured:
    """A case and what it took."""

    case: Case
    result: Result

    def line(self) -> str:
        """For the terminal."""
        case = self.case
        shape = f"T {case.tokens} V {case.vocab} K {case.heads} masked {case.masked:.0%}" if case.what == "loss" else ""
        cost = f"{self.result.median:8.2f} s {_mb(self.result.peak):>8} MB" if self.result.fits else "does not fit"
        return f"{case.what:8} {case.method:10} {case.dtype:8} {shape:36} {cost}"


def write_report(out: Path, facts: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Write train.json, train.md and, where matplotlib is installed, train.png into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    cases = [{"case": asdict(one.case), "result": asdict(one.result)} for one in measured]
    (out / "train.json").write_text(json.dumps({"machine": facts, "cases": cases}, indent=1) + "\n", encoding="utf-8")
    (out / "train.md").write_text(report(facts, measured), encoding="utf-8")
    plot(out / "train.png", measured)


def report(facts: dict[str, Any], measured: Sequence[Measured]) -> str:
    """All tables as Markdown."""
    parts = ["# Cost of training", sentence(facts)]
    for title, table in (
        ("Bars", bars(measured)),
        ("Loss and backward", loss_table(measured)),
        ("Memory over the number of heads", heads_table(measured)),
        ("The whole step on the tiny backbone", step_table(measured)),
        ("Gradient checkpointing", joint_table(measured)),
        ("The whole step at the shape of a 7B model", shape_table(measured)),
    ):
        if table:
            parts += [f"## {title}", table]
    return "\n\n".join(parts) + "\n"


def pairs(measured: Iterable[Measured], *what: str) -> list[tuple[Measured, Measured]]:
    """Measurements that differ in the method alone: naive and ours, kept and recomputed."""
    found: dict[Case, list[Measured]] = {}
    for one in measured:
        if one.case.what in what:
            found.setdefault(replace(one.case, method=""), []).append(one)
    ordered = [sorted(both, key=lambda one: one.case.method) for both in found.values()]
    return [(both[0], both[-1]) for both in ordered if both[0].case.method != both[-1].case.method]


def bars(measured: Sequence[Measured]) -> str:
    """The limits that were set for T 2048, V 32,000, and whether they are kept."""
    lines = []
    for naive, ours in pairs(measured, "loss"):
        case = ours.case
        if (case.tokens, case.vocab, case.heads) != (2048, 32000, 5) or not (naive.result.fits and ours.result.fits):
            continue
        share, gain = ours.result.peak / naive.result.peak, naive.result.median / ours.result.median
        name = f"{case.dtype}, {case.masked:.0%} masked"
        wanted = 1.3 if case.masked else 1.0
        if not case.masked:
            lines.append(_bar(f"{name}: memory {share:.3f} of naive's, at most 0.2", share <= 0.2))
        lines.append(_bar(f"{name}: {gain:.2f}x faster, at least {wanted:g}", gain >= wanted))
    by_dtype: dict[str, list[Measured]] = {}
    for one in _over_heads(measured):
        by_dtype.setdefault(one.case.dtype, []).append(one)
    for dtype, some in by_dtype.items():
        first, last = some[0], some[-1]
        growth = (last.result.peak - first.result.peak) / max(1, last.case.heads - first.case.heads)
        logits = 4 * last.case.tokens * last.case.vocab  # what a head's float32 logits would take
        text = f"{dtype}: memory flat in K: {_mb(round(growth))} MB for a further head, whose logits would take"
        lines.append(_bar(f"{text} {_mb(logits)} MB (at most a tenth)", growth <= 0.1 * logits))
    return "\n".join(lines)


def _bar(text: str, kept: bool) -> str:
    return f"- {'kept' if kept else '**missed**'}: {text}"


def loss_table(measured: Sequence[Measured]) -> str:
    """Seconds and memory of naive and ours."""
    head = [
        "dtype",
        "V",
        "T",
        "masked",
        "naive s",
        "ours s",
        "faster",
        "naive MB",
        "ours MB",
        "share",
        "ours, accumulating MB",
    ]
    rows = []
    for naive, ours in pairs(measured, "loss"):
        case, both = ours.case, naive.result.fits and ours.result.fits
        rows.append(
            [
                case.dtype,
                f"{case.vocab:,}",
                f"{case.tokens:,}",
                f"{case.masked:.0%}",
                _seconds(naive.result),
                _seconds(ours.result),
                f"{naive.result.median / ours.result.median:.2f}x" if both else "",
                _peak(naive.result),
                _peak(ours.result),
                f"{ours.result.peak / naive.result.peak:.3f}" if both else "",
                _mb(ours.result.accumulating or 0) if ours.result.fits else "",
            ]
        )
    return _table(head, rows)


def heads_table(measured: Sequence[Measured]) -> str:
    """Ours for several K."""
    rows = [
        [one.case.dtype, str(one.case.heads), f"{one.case.tokens:,}", _seconds(one.result), _peak(one.result)]
        for one in _over_heads(measured)
    ]
    return _table(["dtype", "K", "T", "s", "MB"], rows)


def _over_heads(measured: Sequence[Measured]) -> list[Measured]:
    """The cases of `ours` at the shape that was measured for several K, K = 5 included."""
    ours = [one for one in measured if one.case.what == "loss" and one.case.method == "ours" and not one.case.masked]
    few = {(one.case.tokens, one.case.vocab) for one in ours if one.case.heads != 5}
    seen = {one.case: one for one in ours if (one.case.tokens, one.case.vocab) in few and one.result.fits}
    return sorted(seen.values(), key=lambda one: (one.case.dtype, one.case.heads))


def step_table(measured: Sequence[Measured]) -> str:
    """Tokens per second of the whole step."""
    rows = []
    for naive, ours in pairs(measured, "medusa1", "medusa2"):
        if not (naive.result.fits and ours.result.fits):
            continue
        rates = [one.result.tokens / one.result.median for one in (naive, ours)]
        rows.append(
            [
                NAMES[ours.case.what],
                ours.case.dtype,
                *(f"{rate:,.0f}" for rate in rates),
                f"{rates[1] / rates[0]:.2f}x",
                _peak(naive.result),
                _peak(ours.result),
                *_estimate(ours.result),
            ]
        )
    head = ["recipe", "dtype", "naive tokens/s", "ours tokens/s", "faster", "naive MB", "ours MB"]
    return _table([*head, "ours, all MB", "--inspect says MB"], rows)


def joint_table(measured: Sequence[Measured]) -> str:
    """A joint step with activations kept and recomputed."""
    rows = []
    for kept, recomputed in pairs(measured, "joint"):
        for one, name in ((kept, "kept"), (recomputed, "recomputed")):
            rows.append([one.case.dtype, name, _seconds(one.result), _peak(one.result), *_estimate(one.result)])
    return _table(["dtype", "activations", "s", "MB", "all MB", "--inspect says MB"], rows)


def shape_table(measured: Sequence[Measured]) -> str:
    """Throughput, share of the device's matrix rate, memory, and hours of the paper's run, naive and ours."""
    rows, shapes = [], set()
    for both in pairs(measured, "shape1", "shape2"):
        for one in both:
            case, result = one.case, one.result
            first = [NAMES[case.what], f"{case.rows} x {case.tokens:,}", one.case.method]
            if not result.fits:
                rows.append([*first, "does not fit", *[""] * 7])
                continue
            shapes.add(result.shape)
            rate = result.tokens / result.median
            used = [operations / result.median / result.rate for operations in (result.operations, result.nominal)]
            hours = [SAMPLES * EPOCHS * tokens / rate / 3600 for tokens in (SAMPLE_TOKENS, case.tokens)]
            memory = [f"{size / 1e9:,.2f}" for size in (result.total or 0, result.peak, result.estimate or 0)]
            rows.append([*first, f"{rate:,.0f}", *(f"{share:.2f}" for share in used), *memory, *map(_hours, hours)])
    if not rows:
        return ""
    titles = ["recipe", "tokens", "method", "tokens/s", "MFU", "MFU by 6N", "all GB", "beyond weights GB"]
    titles += ["--inspect says GB", f"hours, {SAMPLE_TOKENS:,} tokens a sample", "hours, full sequences"]
    note = (
        f"MFU: operations that the recipe needs over the measured rate of a large product; by 6N: 6 x parameters x "
        f"tokens over the same rate, as if the backbone were trained. Hours: {SAMPLES:,} samples, {EPOCHS} epochs, at "
        f"this throughput. All GB: the peak, weights included; beyond weights: less gradients and optimizer as well."
    )
    if "small" in shapes:
        note = f"**No GPU here: a small model, to see that it runs. Its figures say nothing about 7B.** {note}"
    return f"{note}\n\n{_table(titles, rows)}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}"


def _estimate(result: Result) -> tuple[str, str]:
    return _mb(result.total or 0), _mb(result.estimate or 0)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def _peak(result: Result) -> str:
    return _mb(result.peak) if result.fits else "does not fit"


def _seconds(result: Result) -> str:
    return f"{result.median:.2f}" if result.fits else "does not fit"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def plot(path: Path, measured: Sequence[Measured]) -> None:
    """Memory and seconds over T, for every vocabulary and dtype; nothing where matplotlib is missing."""
    unmasked = [one for one in measured if one.case.what == "loss" and one.case.heads == 5 and not one.case.masked]
    try:
        import matplotlib
    except ImportError:
        return
    if not unmasked:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = sorted({(one.case.vocab, one.case.dtype) for one in unmasked})
    figure, axes = pyplot.subplots(2, len(shapes), figsize=(4 * len(shapes), 7), squeeze=False, sharex=True)
    for column, (vocab, dtype) in enumerate(shapes):
        for method, colour in (("naive", "tab:red"), ("ours", "tab:blue")):
            points = [
                (one.case.tokens, one.result.peak / 1e9, one.result.median)
                for one in unmasked
                if (one.case.vocab, one.case.dtype, one.case.method) == (vocab, dtype, method) and one.result.fits
            ]
            if points:
                tokens, gigabytes, seconds = zip(*sorted(points), strict=True)
                axes[0][column].plot(tokens, gigabytes, "o-", color=colour, label=method)
                axes[1][column].plot(tokens, seconds, "o-", color=colour, label=method)
        axes[0][column].set_title(f"V {vocab:,}, {dtype}")
        axes[1][column].set_xlabel("tokens")
    axes[0][0].set_ylabel("GB beyond parameters and gradients")
    axes[1][0].set_ylabel("seconds")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
