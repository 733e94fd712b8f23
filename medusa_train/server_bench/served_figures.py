"""Compute the figures of measured servers: rates, latencies, ratios with intervals, and a
recommendation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_train.evaluation.metrics import Counts, Interval, block_interval
from medusa_train.server_bench.request_blocks import (
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


@dataclass(frozen=True)
class Cell:
    """All answers of one server at one concurrency."""

    server: str
    session: str  # which servers ran at the same time
    concurrency: int
    answers: Mapping[TurnKey, ServedAnswer]
    # each answer's share of the time in which the server was busy, see `busy_shares`
    seconds: Mapping[TurnKey, float]
    blocks: Mapping[TurnKey, int]  # number of the block in which each was asked
    drafts: DraftCounts | None  # difference of the server's counters; None if it has none
    skipped: int  # number of turns whose prompts do not fit into the context

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time in which the server was busy."""
        tokens = sum(answer.tokens for answer in self.answers.values())
        seconds = sum(self.seconds.values())
        return tokens / max(seconds, 1e-9)


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
        if len(measurements) == planned.get(concurrency):
            cells.append(_cell(server, session, concurrency, measurements))
    return cells


def _cell(server: str, session: str, concurrency: int, measurements: Sequence[Measurement]) -> Cell:
    answers: dict[TurnKey, ServedAnswer] = {}
    seconds: dict[TurnKey, float] = {}
    blocks: dict[TurnKey, int] = {}
    for number, measurement in enumerate(measurements):
        keys = [(answer.question_id, answer.turn, answer.repeat) for answer in measurement.answers]
        answers.update(zip(keys, measurement.answers, strict=True))
        blocks.update(dict.fromkeys(keys, number))
        seconds.update(zip(keys, busy_shares(measurement.answers), strict=True))
    drafts = _sum_counts(measurements)
    skipped = sum(len(measurement.skipped) for measurement in measurements)
    return Cell(server, session, concurrency, answers, seconds, blocks, drafts, skipped)


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
    """Compare a server with heads and the one without at one concurrency; None if they have no turn
    in common.

    Returns: `ratio`: tokens per second over those without heads, on the turns that both answered;
        `ratio_interval`: its 95 % interval over blocks (None with fewer than three of them);
        `verdict`: "wins" or "loses" where the whole interval is above or below 1, else "undecided";
        `equal_answers` and `compared_answers` (None for samples).
    """
    common = [key for key in heads.answers if key in plain.answers]
    without_heads = _by_block(plain, heads.blocks, common)
    with_heads = _by_block(heads, heads.blocks, common)
    plain_rate = _rate(without_heads)
    if plain_rate == 0:
        return None
    bounds = block_interval(list(without_heads.values()), list(with_heads.values()))
    comparison: dict[str, Any] = {
        "ratio": _rate(with_heads) / plain_rate,
        "ratio_interval": None,
        "verdict": _verdict(bounds),
        "equal_answers": None,
        "compared_answers": None,
    }
    if bounds is not None:
        comparison["ratio_interval"] = list(bounds)
    if greedy:
        equal, compared = _count_equal(heads, plain, common)
        comparison["equal_answers"] = equal
        comparison["compared_answers"] = compared
    return comparison


def _verdict(bounds: Interval | None) -> str:
    """Say what the interval of a ratio tells about serving heads."""
    if bounds is None:
        return "undecided"
    low, high = bounds
    if low > 1:
        return "wins"
    if high < 1:
        return "loses"
    return "undecided"


def _rate(blocks: Mapping[int, Counts]) -> float:
    """Return tokens per second; 0 without answers."""
    tokens = sum(counts.tokens for counts in blocks.values())
    seconds = sum(counts.cost for counts in blocks.values())
    if seconds == 0:
        return 0.0
    return tokens / seconds


def _by_block(
    cell: Cell, blocks: Mapping[TurnKey, int], keys: Iterable[TurnKey]
) -> dict[int, Counts]:
    sums: dict[int, Counts] = {}
    for key in keys:
        block = blocks[key]
        tokens, seconds = sums.get(block, Counts(0, 0))
        sums[block] = Counts(tokens + cell.answers[key].tokens, seconds + cell.seconds[key])
    return sums


def _count_equal(heads: Cell, plain: Cell, keys: Sequence[TurnKey]) -> tuple[int, int]:
    """Count equal answers and those compared: turns after a differing answer have another history."""
    equal = 0
    compared = 0
    differing: set[tuple[int | str, int]] = set()
    for question, turn, repeat in sorted(keys, key=lambda key: (str(key[0]), key[2], key[1])):
        if (question, repeat) in differing:
            continue
        compared += 1
        key = (question, turn, repeat)
        if heads.answers[key].text == plain.answers[key].text:
            equal += 1
        else:
            differing.add((question, repeat))
    return equal, compared


def reference_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell without heads to compare with: of the same session, else the fastest at this
    concurrency.

    Where one server ran at a time, the server without heads was measured first and last. To beat
    the faster of the two, heads have to win by more than the machine's speed drifted.
    """
    candidates = []
    for other in cells:
        if other.server == PLAIN and other.concurrency == cell.concurrency:
            candidates.append(other)
    together = [other for other in candidates if other.session == cell.session]
    return max(together or candidates, key=_tokens_per_s, default=None)


def _tokens_per_s(cell: Cell) -> float:
    return cell.tokens_per_s


def cell_figures(cell: Cell) -> dict[str, Any]:
    """Return the figures of one cell as plain JSON values."""
    # 1. seconds to the first token, and per further token, of the answers that have them
    answers = cell.answers.values()
    first_token = []
    per_token = []
    for answer in answers:
        if answer.first_token is None:
            continue
        first_token.append(answer.first_token)
        if answer.tokens > 1:
            per_token.append((answer.seconds - answer.first_token) / (answer.tokens - 1))

    # 2. the figures
    figures: dict[str, Any] = {
        "server": cell.server,
        "session": cell.session,
        "concurrency": cell.concurrency,
        "answers": len(answers),
        "skipped_turns": cell.skipped,
        "tokens": sum(answer.tokens for answer in answers),
        "seconds": sum(cell.seconds.values()),
        "tokens_per_s": cell.tokens_per_s,
        "time_to_first_token_s": _median(first_token),
        "time_per_token_s": _median(per_token),
        "tokens_per_step": None,
        "acceptance": None,
        "drafts": None,
        "num_speculative_tokens": None,
    }
    drafts = cell.drafts
    if drafts is not None:
        figures["tokens_per_step"] = drafts.tokens_per_step
        figures["acceptance"] = drafts.acceptance
        figures["drafts"] = drafts.drafts
        figures["num_speculative_tokens"] = drafts.speculative_tokens
    return figures


def _median(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"median": statistics.median(seconds)}


def recommend(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return by concurrency `use`, whether to serve heads, and the figures of the best ones that
    win, else of the best.

    Args:
        compared: figures of the cells with heads that have a comparison.
    """
    advice = []
    for concurrency in sorted({figures["concurrency"] for figures in compared}):
        here = [figures for figures in compared if figures["concurrency"] == concurrency]
        winners = [figures for figures in here if figures["verdict"] == "wins"]
        best = max(winners or here, key=lambda figures: figures["ratio"])
        advice.append(
            {
                "concurrency": concurrency,
                "use": bool(winners),
                "server": best["server"],
                "num_speculative_tokens": best["num_speculative_tokens"],
                "ratio": best["ratio"],
                "ratio_interval": best["ratio_interval"],
                "verdict": best["verdict"],
            }
        )
    return advice


def summarize(cells: Sequence[Cell], *, greedy: bool) -> dict[str, Any]:
    """Return the parts of served.json that follow from the measured cells.

    Returns: `cells`: figures of every cell, with heads also compared to the server without;
        `plain`: figures of the server without heads by concurrency, in its fastest session;
        `recommendation`; and `notes`.
    """
    all_figures = []
    compared = []
    fastest: dict[int, Cell] = {}
    for cell in cells:
        figures = cell_figures(cell)
        all_figures.append(figures)
        if cell.server == PLAIN:
            earlier = fastest.get(cell.concurrency)
            if earlier is None or cell.tokens_per_s >= earlier.tokens_per_s:
                fastest[cell.concurrency] = cell
        elif cell.server != ALONE:
            comparison = _compare_with_reference(cell, cells, greedy=greedy)
            if comparison is not None:
                figures.update(comparison)
                compared.append(figures)
    return {
        "plain": [cell_figures(cell) for cell in fastest.values()],
        "cells": all_figures,
        "recommendation": recommend(compared),
        "notes": _equality_notes(compared),
    }


def _compare_with_reference(
    cell: Cell, cells: Sequence[Cell], *, greedy: bool
) -> dict[str, Any] | None:
    """Compare a server with heads and its reference; None if it has none."""
    plain = reference_of(cell, cells)
    if plain is None:
        return None
    return compare_cells(cell, plain, greedy=greedy)


def _equality_notes(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Note that no greedy answer of a server equals that without heads: one of the two serves
    another model.
    """
    differing = []
    for figures in compared:
        # None for samples, which are not compared
        if figures["equal_answers"] == 0 and figures["compared_answers"] >= ALL_DIFFER:
            differing.append(f"{figures['server']} at concurrency {figures['concurrency']}")
    if not differing:
        return []
    return [
        f"no greedy answer equals that of the server without heads ({', '.join(differing)}): do"
        " they serve the same model, with the same dtype and chat template?"
    ]
