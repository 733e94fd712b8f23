"""Reads question files: MT-Bench's form, HumanEval's and GSM8K's own. Knows no bench by name and no model.

A question file in MT-Bench's form holds one JSON object per line: `question_id` (number or text), `category` (text,
optional), `turns` (the user's messages, asked one after the other) and `reference` (answers to judge by, optional).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.data.sources import parquet_rows
from medusa_train.errors import DataError

MAX_REPORTED_PROBLEMS = 5
#: HumanEval's prompts are the beginning of a file; a chat model has to be told what to do with it.
COMPLETE = "Complete this Python function. Answer with the whole function.\n\n"


@dataclass(frozen=True)
class Question:
    """One question of a bench: the user's turns, where they stand (`file:line`), and reference answers if any."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    source: str
    reference: tuple[str, ...] = ()


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a question file.

    Raises DataError naming `file:line` and the reason for the first few broken lines, or when there is none at all.
    """
    questions: list[Question] = []
    problems: list[str] = []
    first_seen: dict[int | str, str] = {}
    for number, line in _lines(path):
        source = f"{path}:{number}"
        try:
            question = _parse(line, source, number)
            earlier = first_seen.setdefault(question.question_id, source)
            if earlier != source:
                raise ValueError(f"question_id {question.question_id!r} was used before, at {earlier}")
        except ValueError as error:
            problems.append(f"{source}: {error}")
            continue
        questions.append(question)
    if problems:
        more = len(problems) - MAX_REPORTED_PROBLEMS
        shown = problems[:MAX_REPORTED_PROBLEMS] + ([f"... and {more} more broken lines"] if more > 0 else [])
        raise DataError("\n".join(shown))
    if not questions:
        raise DataError(f"{path}: holds no questions; one JSON object per line is expected")
    return tuple(questions)


def _lines(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """The records of a file with their numbers: lines that are not empty, or the rows of a parquet file."""
    if path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), start=1)
        return
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    # Not splitlines(): JSON strings may hold U+2028 and the like, which it would break lines at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: str | dict[str, Any], source: str, number: int) -> Question:
    record = line
    if isinstance(line, str):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
    if isinstance(record.get("task_id"), str) and isinstance(record.get("prompt"), str):
        return Question(record["task_id"], "humaneval", (COMPLETE + record["prompt"],), source)
    if isinstance(record.get("question"), str) and isinstance(record.get("answer"), str):
        return Question(number, "gsm8k", (record["question"],), source, (record["answer"],))
    # The hub's copy of MT-Bench calls the turns `prompt`, and once converted the id `prompt_id`.
    question_id = record.get("question_id", record.get("prompt_id"))
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise ValueError("question_id is missing or neither a number nor text")
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns is missing or not a list of the user's messages")
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"turn {place} is empty or not text")
    category = record.get("category", "general")
    if not isinstance(category, str) or not category.strip():
        raise ValueError("category is empty or not text")
    return Question(question_id, category.strip(), tuple(turns), source, _reference(record.get("reference")))


def _reference(found: object) -> tuple[str, ...]:
    """The reference answers, one per turn, as far as they are there."""
    given = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return tuple(item for item in given if isinstance(item, str))
