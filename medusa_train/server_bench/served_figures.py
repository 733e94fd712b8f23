"""Compute the figures of measured servers: rates, latencies, ratios with intervals, and a
recommendation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_train.evaluation.figures import Counts, block_interval
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
        return sum(answer.tokens for answer in self.answers.values()) / max(
            sum(self.seconds.values()), 1e-9
        )


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
    return [
        _cell(*key, measured)
        for key, measured in found.items()
        if len(measured) == planned.get(key[2])
    ]


def _cell(server: str, session: str, concurrency: int, measurements: Sequence[Measurement]) -> Cell:
    answers: dict[TurnKey, ServedAnswer] = {}
    seconds: dict[TurnKey, float] = {}
    blocks: dict[TurnKey, int] = {}
    drafts: DraftCounts | None = DraftCounts(0, ())
    for number, measurement in enumerate(measurements):
        keys = [(answer.question_id, answer.turn, answer.repeat) for answer in measurement.answers]
        answers.update(zip(keys, measurement.answers, strict=True))
        blocks.update(dict.fromkeys(keys, number))
        seconds.update(zip(keys, busy_shares(measurement.answers), strict=True))
        drafts = drafts and measurement.drafts and drafts + measurement.drafts
    skipped = sum(len(measurement.skipped) for measurement in measurements)
    return Cell(server, session, concurrency, answers, seconds, blocks, drafts, skipped)


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
        for one in running:
            shares[one] += (moment - last) / len(running)
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
    without, with_heads = (
        _by_block(plain, heads.blocks, common),
        _by_block(heads, heads.blocks, common),
    )
    if not _rate(without):
        return None
    bounds = block_interval(list(without.values()), list(with_heads.values()))
    verdict = (
        "undecided"
        if bounds is None
        else "wins"
        if bounds[0] > 1
        else "loses"
        if bounds[1] < 1
        else "undecided"
    )
    equal, compared = _count_equal(heads, plain, common) if greedy else (None, None)
    return {
        "ratio": _rate(with_heads) / _rate(without),
        "ratio_interval": bounds and list(bounds),
        "verdict": verdict,
        "equal_answers": equal,
        "compared_answers": compared,
    }


def _rate(blocks: Mapping[int, Counts]) -> float:
    """Return tokens per second; 0 without answers."""
    seconds = sum(counts.cost for counts in blocks.values())
    return sum(counts.tokens for counts in blocks.values()) / seconds if seconds else 0.0


def _by_block(
    cell: Cell, blocks: Mapping[TurnKey, int], keys: Iterable[TurnKey]
) -> dict[int, Counts]:
    sums: dict[int, Counts] = {}
    for key in keys:
        tokens, seconds = sums.get(blocks[key], Counts(0, 0))
        sums[blocks[key]] = Counts(tokens + cell.answers[key].tokens, seconds + cell.seconds[key])
    return sums


def _count_equal(heads: Cell, plain: Cell, keys: Sequence[TurnKey]) -> tuple[int, int]:
    """Count equal answers and those compared: turns after a differing answer have another history."""
    equal = compared = 0
    differing: set[tuple[int | str, int]] = set()
    for question, turn, repeat in sorted(keys, key=lambda key: (str(key[0]), key[2], key[1])):
        if (question, repeat) in differing:
            continue
        compared += 1
        if heads.answers[question, turn, repeat].text == plain.answers[question, turn, repeat].text:
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
    candidates = [
        one for one in cells if one.server == PLAIN and one.concurrency == cell.concurrency
    ]
    together = [one for one in candidates if one.session == cell.session]
    return max(together or candidates, key=lambda one: one.tokens_per_s, default=None)


def cell_figures(cell: Cell) -> dict[str, Any]:
    """Return the figures of one cell as plain JSON values."""
    answers, drafts = list(cell.answers.values()), cell.drafts
    first = [answer.first_token for answer in answers if answer.first_token is not None]
    per_token = [
        (answer.seconds - answer.first_token) / (answer.tokens - 1)
        for answer in answers
        if answer.first_token is not None and answer.tokens > 1
    ]
    return {
        "server": cell.server,
        "session": cell.session,
        "concurrency": cell.concurrency,
        "answers": len(answers),
        "skipped_turns": cell.skipped,
        "tokens": sum(answer.tokens for answer in answers),
        "seconds": sum(cell.seconds.values()),
        "tokens_per_s": cell.tokens_per_s,
        "time_to_first_token_s": {"median": statistics.median(first)} if first else None,
        "time_per_token_s": {"median": statistics.median(per_token)} if per_token else None,
        "tokens_per_step": None if drafts is None else drafts.tokens_per_step,
        "acceptance": None if drafts is None else drafts.acceptance,
        "drafts": None if drafts is None else drafts.drafts,
        "num_speculative_tokens": None if drafts is None else drafts.speculative_tokens,
    }


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
        names = ("server", "num_speculative_tokens", "ratio", "ratio_interval", "verdict")
        advice.append(
            {
                "concurrency": concurrency,
                "use": bool(winners),
                **{name: best[name] for name in names},
            }
        )
    return advice


def summarize(cells: Sequence[Cell], *, greedy: bool) -> dict[str, Any]:
    """Return the parts of served.json that follow from the measured cells.

    Returns: `cells`: figures of every cell, with heads also compared to the server without;
        `plain`: figures of the server without heads by concurrency, in its fastest session;
        `recommendation`; and `notes`.
    """
    figures, fastest = [], dict[int, Cell]()
    for cell in cells:
        plain = None if cell.server in (PLAIN, ALONE) else reference_of(cell, cells)
        comparison = None if plain is None else compare_cells(cell, plain, greedy=greedy)
        figures.append({**cell_figures(cell), **(comparison or {})})
        if cell.server == PLAIN:
            fastest[cell.concurrency] = max(
                cell, fastest.get(cell.concurrency, cell), key=lambda one: one.tokens_per_s
            )
    return {
        "plain": [cell_figures(cell) for cell in fastest.values()],
        "cells": figures,
        "recommendation": recommend([one for one in figures if "ratio" in one]),
        "notes": _equality_notes(figures),
    }


def _equality_notes(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Note that no greedy answer of a server equals that without heads: one of the two serves
    another model.
    """
    differing = [
        f"{one['server']} at concurrency {one['concurrency']}"
        for one in figures
        if one.get("equal_answers") == 0 and one["compared_answers"] >= ALL_DIFFER
    ]
    note = (
        f"no greedy answer equals that of the server without heads ({', '.join(differing)}): do"
        " they serve the same model, with the same dtype and chat template?"
    )
    return [note] if differing else []
