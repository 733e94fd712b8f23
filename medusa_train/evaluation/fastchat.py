"""Answers and judgements in FastChat's JSONL forms, so that its tools read them. Knows no model and no network."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

from medusa_train.evaluation.records import TimedAnswer, TurnRecord


def _step_lengths(answer: TimedAnswer) -> list[int]:
    """Tokens of every step: what was accepted and the backbone's own, which a last step may end before."""
    lengths = [accepted + 1 for accepted in answer.accepted]
    if lengths:
        lengths[-1] -= sum(lengths) + 1 - len(answer.tokens)  # the first token is the prefill's
    return lengths


def model_answers(records: Sequence[TurnRecord], model_id: str) -> list[dict[str, Any]]:
    """One `model_answer` line per question: FastChat's keys, and in the choice what Spec-Bench adds to them.

    Spec-Bench's `accept_lengths` counts all tokens that a step gave, the backbone's own included.
    """
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    lines = []
    for question_id, turns in questions.items():
        texts = [turn.text for turn in turns]
        name = hashlib.sha256(json.dumps([model_id, question_id, texts]).encode()).hexdigest()[:22]
        choice = {
            "index": 0,
            "turns": texts,
            "decoding_steps": [turn.answer.steps for turn in turns],
            "new_tokens": [len(turn.answer.tokens) for turn in turns],
            "wall_time": [turn.answer.seconds for turn in turns],
            "accept_lengths": [length for turn in turns for length in _step_lengths(turn.answer)],
        }
        lines.append(
            {
                "question_id": question_id,
                "category": turns[0].category,
                "answer_id": name,
                "model_id": model_id,
                "choices": [choice],
                "tstamp": time.time(),
            }
        )
    return lines


def judgement(
    question_id: int | str,
    model_id: str,
    judge: str,
    prompt_name: str,
    prompt: str,
    reply: str,
    score: float,
    turn: int,
) -> dict[str, Any]:
    """One `model_judgment` line of single-answer grading; a score of -1 says that none was found in the reply."""
    return {
        "question_id": question_id,
        "model": model_id,
        "judge": [judge, prompt_name],
        "user_prompt": prompt,
        "judgment": reply,
        "score": score,
        "turn": turn,
        "tstamp": time.time(),
    }
