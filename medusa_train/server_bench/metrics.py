"""Metrics of measured servers: rates, latencies, ratios with intervals, and a recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from medusa_train.evaluation.metrics import Counts, Interval, block_interval
from medusa_train.evaluation.questions import WITH_CALLS, WITHOUT_CALLS
from medusa_train.server_bench.pairs import (
    ALONE,
    PLAIN,
    Block,
    DraftCounts,
    Measurement,
    ServedAnswer,
)

#: If none of this many greedy answers is equal, the reason is neither chance nor rounding.
ALL_DIFFER = 8

#: A turn of a question, with the number of its repeat.
TurnKey = tuple[int | str, int, int]


class BusyAnswer(NamedTuple):
    """An answer, its share of the time in which the server was busy (`busy_shares`), and the number
    of its block.
    """

    answer: ServedAnswer
    seconds: float
    block: int


@dataclass(frozen=True)
class Cell:
    """All answers of one server at one concurrency."""

    server: str
    session: str  # which servers ran at the same time
    concurrency: int
    answers: Mapping[TurnKey, BusyAnswer]
    drafts: DraftCounts | None  # difference of the server's counters; None if it has none
    skipped: int  # number of turns whose prompts do not fit into the context
    # the same difference for answers of chats with tools that make calls, and for the others
    drafts_of: Mapping[str, DraftCounts | None] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.answer.tokens for one in self.answers.values())

    @property
    def seconds(self) -> float:
        """Time in which the server was busy."""
        return sum(one.seconds for one in self.answers.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time in which the server was busy."""
        return self.tokens / max(self.seconds, 1e-9)


def collect_cells(
    blocks: Mapping[Block, Mapping[str, Measurement]], planned: Mapping[int, int]
) -> list[Cell]:
    """Join the blocks of every server, session and concurrency whose `planned` number of blocks is
    complete.
    """
    found: dict[tuple[str, str, int], list[Measurement]] = {}
    for block, measured in sorted(blocks.items()):
        for server, measurement in measured.items():
            found.setdefault((server, block.session, block.concurrency), []).append(measurement)
    cells = []
    for (server, session, concurrency), measurements in found.items():
        if len(measurements) != planned.get(concurrency):
            continue
        answers = {}
        for number, measurement in enumerate(measurements):
            shares = busy_shares(measurement.answers)
            for answer, seconds in zip(measurement.answers, shares, strict=True):
                key = (answer.question_id, answer.turn, answer.repeat)
                answers[key] = BusyAnswer(answer, seconds, number)
        skipped = sum(len(measurement.skipped) for measurement in measurements)
        drafts_of: dict[str, DraftCounts | None] = {}
        for category in (WITH_CALLS, WITHOUT_CALLS):
            blocks_of = [m for m in measurements if any(a.category == category for a in m.answers)]
            if blocks_of:
                drafts_of[category] = _sum_counts(blocks_of)
        drafts = _sum_counts(measurements)
        cells.append(Cell(server, session, concurrency, answers, drafts, skipped, drafts_of))
    return cells


def _sum_counts(measurements: Iterable[Measurement]) -> DraftCounts | None:
    """Sum the counters of a server over its blocks; None if any block has none."""
    total = DraftCounts(0, ())
    for measurement in measurements:
        if measurement.drafts is None:
            return None
        total = total + measurement.drafts
    return total


def busy_shares(answers: Sequence[ServedAnswer]) -> list[float]:
    """Divide the time in which any of the answers was under way: every moment in equal parts among
    those under way.
    """
    times = [(answer.started, answer.started + answer.seconds) for answer in answers]
    starts = [(start, 0, number) for number, (start, _) in enumerate(times)]
    ends = [(end, 1, number) for number, (_, end) in enumerate(times)]
    shares = [0.0] * len(answers)
    running: set[int] = set()
    last = 0.0
    for moment, _, number in sorted(starts + ends):
        for answer in running:
            shares[answer] += (moment - last) / len(running)
        last = moment
        running ^= {number}
    return shares


def compare_cells(heads: Cell, plain: Cell, *, greedy: bool) -> dict[str, Any] | None:
    """Compare a server with a draft and the one without at one concurrency; None if they have no
    turn in common.

    Returns: `ratio`: tokens per second over those without a draft, on the turns that both answered;
        `ratio_interval`: its 95 % interval over blocks (None with fewer than three of them);
        `verdict`: "wins" or "loses" where the whole interval is above or below 1, else "undecided";
        `equal_answers` and `compared_answers` (None for samples).
    """
    # 1. tokens and seconds of both, by block of the server with a draft
    common = [key for key in heads.answers if key in plain.answers]
    blocks: dict[int, list[TurnKey]] = {}
    for key in common:
        blocks.setdefault(heads.answers[key].block, []).append(key)
    without_draft = [_total(plain, keys) for keys in blocks.values()]
    with_draft = [_total(heads, keys) for keys in blocks.values()]
    plain_rate = _rate(without_draft)
    if plain_rate == 0:
        return None
    # 2. the ratio of their rates, and equal answers
    bounds = block_interval(without_draft, with_draft)
    equal, compared = _count_equal(heads, plain, common) if greedy else (None, None)
    return {
        "ratio": _rate(with_draft) / plain_rate,
        "ratio_interval": None if bounds is None else list(bounds),
        "verdict": _verdict(bounds),
        "equal_answers": equal,
        "compared_answers": compared,
    }


def _total(cell: Cell, keys: Iterable[TurnKey]) -> Counts:
    chosen = [cell.answers[key] for key in keys]
    return Counts(sum(one.answer.tokens for one in chosen), sum(one.seconds for one in chosen))


def _rate(blocks: Sequence[Counts]) -> float:
    """Return tokens per second; 0 without answers."""
    tokens, seconds = map(sum, zip(*blocks, strict=True)) if blocks else (0, 0)
    return tokens / seconds if seconds else 0.0


def _verdict(bounds: Interval | None) -> str:
    """Say what the interval of a ratio tells about serving a draft."""
    if bounds is None:
        return "undecided"
    low, high = bounds
    if low > 1:
        return "wins"
    if high < 1:
        return "loses"
    return "undecided"


def _count_equal(heads: Cell, plain: Cell, keys: Sequence[TurnKey]) -> tuple[int, int]:
    """Count equal answers and those compared: turns after a differing answer have another history."""
    equal = 0
    compared = 0
    differing: set[tuple[int | str, int]] = set()
    for key in sorted(keys, key=lambda key: key[1]):
        question, _, repeat = key
        if (question, repeat) in differing:
            continue
        compared += 1
        if heads.answers[key].answer.text == plain.answers[key].answer.text:
            equal += 1
        else:
            differing.add((question, repeat))
    return equal, compared


def reference_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell without a draft to compare with: of the same session, else the fastest at
    this concurrency.

    Where one server ran at a time, the server without a draft was measured first and last. To beat
    the faster of the two, a draft has to win by more than the machine's speed drifted.
    """
    plain = [
        other for other in cells if other.server == PLAIN and other.concurrency == cell.concurrency
    ]
    together = [other for other in plain if other.session == cell.session]
    return max(together or plain, key=lambda other: other.tokens_per_s, default=None)


def cell_metrics(cell: Cell) -> dict[str, Any]:
    """Return the metrics of one cell as plain JSON values."""
    # 1. seconds to the first token, and per further token, of the answers that have them
    first_token = []
    per_token = []
    for answer, _, _ in cell.answers.values():
        if answer.first_token is None:
            continue
        first_token.append(answer.first_token)
        if answer.tokens > 1:
            per_token.append((answer.seconds - answer.first_token) / (answer.tokens - 1))
    # 2. all of them
    drafts = cell.drafts
    return {
        "server": cell.server,
        "session": cell.session,
        "concurrency": cell.concurrency,
        "answers": len(cell.answers),
        "skipped_turns": cell.skipped,
        "tokens": cell.tokens,
        "seconds": cell.seconds,
        "tokens_per_s": cell.tokens_per_s,
        "time_to_first_token_s": {"median": median(first_token)} if first_token else None,
        "time_per_token_s": {"median": median(per_token)} if per_token else None,
        "tokens_per_step": drafts and drafts.tokens_per_step,
        "tokens_per_step_of": {
            category: counts and counts.tokens_per_step
            for category, counts in cell.drafts_of.items()
        },
        "acceptance": drafts and drafts.acceptance,
        "drafts": drafts and drafts.drafts,
        "num_speculative_tokens": drafts and drafts.speculative_tokens,
    }


def recommend(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return by concurrency `use`, whether to serve a draft, and the metrics of the best one that
    wins, else of the best.

    Args:
        compared: metrics of the cells with a draft that have a comparison.
    """
    advice = []
    names = ("server", "num_speculative_tokens", "ratio", "ratio_interval", "verdict")
    for concurrency in sorted({row["concurrency"] for row in compared}):
        here = [row for row in compared if row["concurrency"] == concurrency]
        winners = [row for row in here if row["verdict"] == "wins"]
        best = max(winners or here, key=lambda row: row["ratio"])
        chosen = {name: best[name] for name in names}
        advice.append({"concurrency": concurrency, "use": bool(winners), **chosen})
    return advice


def summarize(cells: Sequence[Cell], *, greedy: bool) -> dict[str, Any]:
    """Return the parts of served.json that follow from the measured cells.

    Returns: `cells`: metrics of every cell, with a draft also compared to the server without;
        `plain`: metrics of the server without a draft by concurrency, in its fastest session;
        `recommendation`; and `notes`.
    """
    rows = []
    compared = []
    fastest: dict[int, Cell] = {}
    for cell in cells:
        row = cell_metrics(cell)
        rows.append(row)
        plain = reference_of(cell, cells)
        if cell.server == PLAIN:
            earlier = fastest.setdefault(cell.concurrency, cell)
            fastest[cell.concurrency] = max(cell, earlier, key=lambda one: one.tokens_per_s)
        elif cell.server != ALONE and plain is not None:
            comparison = compare_cells(cell, plain, greedy=greedy)
            if comparison is not None:
                row.update(comparison)
                compared.append(row)
    return {
        "plain": [cell_metrics(cell) for cell in fastest.values()],
        "cells": rows,
        "recommendation": recommend(compared),
        "notes": _equality_notes(compared),
    }


def _equality_notes(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Note that no greedy answer of a server equals that without a draft: one of the two serves
    another model.
    """
    differing = [
        f"{row['server']} at concurrency {row['concurrency']}"
        for row in compared
        # None for samples, which are not compared
        if row["equal_answers"] == 0 and row["compared_answers"] >= ALL_DIFFER
    ]
    if not differing:
        return []
    return [
        f"no greedy answer equals that of the server without heads ({', '.join(differing)}): do"
        " they serve the same model, with the same dtype and chat template?"
    ]
