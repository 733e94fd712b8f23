"""Metrics of measured servers: rates, latencies, ratios with intervals, and a recommendation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from medusa_train.evaluation.metrics import Counts, block_interval
from medusa_train.evaluation.questions import WITH_CALLS, WITHOUT_CALLS
from medusa_train.server_bench.blocks import (
    ALONE,
    PLAIN,
    BlockKey,
    DraftCounts,
    Measurement,
    ServedAnswer,
    TurnKey,
)

#: If at least this many greedy answers are compared and none is equal, the reason is neither chance
#: nor rounding.
ALL_DIFFER = 8


class Cell(NamedTuple):
    """The blocks of one server at one concurrency, and their metrics (see `cell_metrics`)."""

    metrics: dict[str, Any]
    blocks: Sequence[Measurement]


def collect_cells(
    blocks: Mapping[BlockKey, Mapping[str, Measurement]], planned: Mapping[int, int]
) -> list[Cell]:
    """Collect the blocks of every server, session and concurrency into cells. A cell is left out
    unless all of its blocks are measured.

    Args:
        planned: number of blocks by concurrency.
    """
    measurements_by_cell: dict[tuple[str, str, int], list[Measurement]] = {}
    for block, measured in sorted(blocks.items()):
        for server, measurement in measured.items():
            place = (server, block.session, block.concurrency)
            measurements_by_cell.setdefault(place, []).append(measurement)
    cells = []
    for (server, session, concurrency), measurements in measurements_by_cell.items():
        if len(measurements) == planned.get(concurrency):
            names = {"server": server, "session": session, "concurrency": concurrency}
            cells.append(Cell({**names, **cell_metrics(measurements)}, measurements))
    return cells


def cell_metrics(blocks: Sequence[Measurement]) -> dict[str, Any]:
    """Return the metrics of all blocks of a cell as plain JSON values."""
    # 1. seconds to the first token, and seconds per further token, of answers that have them
    answers = [answer for block in blocks for answer in block.answers]
    first_token = []
    per_token = []
    for answer in answers:
        if answer.first_token is None:
            continue
        first_token.append(answer.first_token)
        if answer.tokens > 1:
            per_token.append((answer.seconds - answer.first_token) / (answer.tokens - 1))
    # 2. counters: of all blocks, and of the blocks of chats with tools by category
    drafts = _sum_counts(blocks)
    tokens_per_step_of = {}
    for category in (WITH_CALLS, WITHOUT_CALLS):
        chosen = [block for block in blocks if any(a.category == category for a in block.answers)]
        if chosen:
            counts = _sum_counts(chosen)
            tokens_per_step_of[category] = counts and counts.tokens_per_step
    # 3. all metrics
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(sum(busy_shares(block.answers)) for block in blocks)
    return {
        "answers": len(answers),
        "skipped_turns": sum(block.skipped for block in blocks),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / max(seconds, 1e-9),
        "time_to_first_token_s": {"median": median(first_token)} if first_token else None,
        "time_per_token_s": {"median": median(per_token)} if per_token else None,
        "tokens_per_step": drafts and drafts.tokens_per_step,
        "tokens_per_step_of": tokens_per_step_of,
        "acceptance": drafts and drafts.acceptance,
        "drafts": drafts and drafts.drafts,
        "num_speculative_tokens": drafts and drafts.speculative_tokens,
    }


def busy_shares(answers: Sequence[ServedAnswer]) -> list[float]:
    """Divide the time in which any answer was in progress: every moment is divided equally among
    the answers in progress. Return the seconds of each answer.
    """
    moments = []
    for number, answer in enumerate(answers):
        moments += [(answer.started, 0, number), (answer.started + answer.seconds, 1, number)]
    shares = [0.0] * len(answers)
    running: set[int] = set()
    last_moment = 0.0
    for moment, _, number in sorted(moments):
        for other in running:
            shares[other] += (moment - last_moment) / len(running)
        last_moment = moment
        running ^= {number}
    return shares


def _sum_counts(blocks: Iterable[Measurement]) -> DraftCounts | None:
    """Sum the counters of a server over its blocks; None if any block has no counters."""
    total = DraftCounts()
    for block in blocks:
        if block.drafts is None:
            return None
        total = total.plus(block.drafts)
    return total


def compare_cells(heads: Cell, plain: Cell, *, greedy: bool) -> dict[str, Any] | None:
    """Compare a server with a draft and the server without one at the same concurrency; None if
    they answered no turn in common.

    Returns:
        ratio: tokens per second with the draft divided by tokens per second without, on the turns
            that both servers answered.
        ratio_interval: its 95 % interval over blocks; None with fewer than three blocks.
        verdict: "wins" or "loses" if the whole interval is above or below 1, else "undecided".
        equal_answers, compared_answers: numbers of greedy answers; None for sampled answers.
    """
    pairs = list(zip(heads.blocks, plain.blocks, strict=False))
    draft_counts = []
    plain_counts = []
    for one, other in pairs:
        common = {answer.key for answer in one.answers} & {answer.key for answer in other.answers}
        if common:
            draft_counts.append(_total(one, common))
            plain_counts.append(_total(other, common))
    plain_rate = _rate(plain_counts)
    if plain_rate == 0:
        return None
    bounds = block_interval(plain_counts, draft_counts)
    verdict = "undecided"
    if bounds is not None and not bounds[0] <= 1 <= bounds[1]:
        verdict = "wins" if bounds[0] > 1 else "loses"
    equal, compared = _count_equal(pairs) if greedy else (None, None)
    return {
        "ratio": _rate(draft_counts) / plain_rate,
        "ratio_interval": None if bounds is None else list(bounds),
        "verdict": verdict,
        "equal_answers": equal,
        "compared_answers": compared,
    }


def _rate(blocks: Sequence[Counts]) -> float:
    """Return tokens per second; 0 without answers."""
    seconds = sum(block.cost for block in blocks)
    return sum(block.tokens for block in blocks) / seconds if seconds else 0.0


def _total(block: Measurement, turns: Collection[TurnKey]) -> Counts:
    """Return the tokens of the answers with the given keys, and their share of the busy time."""
    total = Counts(0, 0.0)
    for answer, seconds in zip(block.answers, busy_shares(block.answers), strict=True):
        if answer.key in turns:
            total = Counts(total.tokens + answer.tokens, total.cost + seconds)
    return total


def _count_equal(pairs: Iterable[tuple[Measurement, Measurement]]) -> tuple[int, int]:
    """Count the equal answers and the compared answers. Turns after a differing answer are not
    compared, because their histories differ.
    """
    num_equal = 0
    num_compared = 0
    for one, other in pairs:
        texts = {answer.key: answer.text for answer in other.answers}
        differing: set[tuple[int | str, int]] = set()
        for answer in sorted(one.answers, key=lambda answer: answer.turn):
            chat = (answer.question_id, answer.repeat)
            if answer.key in texts and chat not in differing:
                num_compared += 1
                if texts[answer.key] == answer.text:
                    num_equal += 1
                else:
                    differing.add(chat)
    return num_equal, num_compared


def reference_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell without a draft to compare `cell` with: from the same session, else the
    fastest at this concurrency.

    If only one server ran at a time, the server without a draft was measured first and last. A
    draft that beats the faster of the two wins by more than the machine's speed drifted.
    """
    plain_cells = [
        one
        for one in cells
        if one.metrics["server"] == PLAIN
        and one.metrics["concurrency"] == cell.metrics["concurrency"]
    ]
    session = cell.metrics["session"]
    # a cell of the same session comes before all others
    return max(
        plain_cells,
        key=lambda one: (one.metrics["session"] == session, one.metrics["tokens_per_s"]),
        default=None,
    )


def recommend(compared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each concurrency whether to serve a draft (`use`), and the metrics of the best
    winning draft. If no draft wins, these are the metrics of the best draft.

    Args:
        compared: metrics of the cells with a draft that were compared.
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

    Returns:
        cells: metrics of every cell; for a server with a draft also `compare_cells`.
        plain: for each concurrency the metrics of the server without a draft in its fastest
            session.
        recommendation: see `recommend`.
        notes: remarks for the report.
    """
    rows = []
    for cell in cells:
        comparison = None
        has_heads = cell.metrics["server"] not in (PLAIN, ALONE)
        if has_heads and (plain := reference_of(cell, cells)) is not None:
            comparison = compare_cells(cell, plain, greedy=greedy)
        rows.append({**cell.metrics, **(comparison or {})})
    fastest: dict[int, dict[str, Any]] = {}
    for row in rows:
        best = fastest.get(row["concurrency"])
        if row["server"] == PLAIN and (not best or row["tokens_per_s"] >= best["tokens_per_s"]):
            fastest[row["concurrency"]] = row
    compared = [row for row in rows if "ratio" in row]
    # if no answer is equal, one of the two servers may serve another model; sampled answers are not
    # compared
    differing = [
        f"{row['server']} at concurrency {row['concurrency']}"
        for row in compared
        if row["equal_answers"] == 0 and row["compared_answers"] >= ALL_DIFFER
    ]
    notes = []
    if differing:
        notes.append(
            f"no greedy answer equals that of the server without heads ({', '.join(differing)}): do"
            " they serve the same model, with the same dtype and chat template?"
        )
    return {
        "plain": list(fastest.values()),
        "cells": rows,
        "recommendation": recommend(compared),
        "notes": notes,
    }
