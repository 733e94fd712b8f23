"""Prompts for self-distillation: the user's messages of chat records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_train.data.records import describe_problems, parse_user_turns
from medusa_train.data.sources import SEED_DATASETS, HubSplit, LocalFiles
from medusa_train.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """The user's side of one conversation.

    Attributes:
        id: unique within the seed data set.
        turns: the user's messages in order.
        system: the system message, or None.
        source: where it was read, as `file:line`.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""


def read_prompts(
    source: Path | LocalFiles | HubSplit, type: str = "auto", *, skipped: list[str] | None = None
) -> list[Prompt]:
    """Read prompts in any format of `parse_user_turns`. Records without a user message are skipped.

    A repeated id gets a number (`id~2`).

    Args:
        source: an opened data set, or a file.
        type: record format.
        skipped: a list that receives `file:line: reason` of invalid records, which are skipped then.

    Raises:
        DataError: the file cannot be read, has no user message at all, or has invalid records (if `skipped` is None).
    """
    if isinstance(source, Path):
        source = LocalFiles((source,))
    prompts: list[Prompt] = []
    problems: list[str] = []
    id_counts: dict[str, int] = {}
    for record in source.records(skip_blank_lines=True):
        try:
            if record.error is not None:
                raise ValueError(record.error)
            turns, system = parse_user_turns(record.value, type)
        except ValueError as error:
            problems.append(f"{record.source}: {error}")
            continue
        if turns:
            record_id = _record_id(record.value, turns, system)
            prompts.append(_with_unique_id(Prompt(record_id, tuple(turns), system, record.source), id_counts))
    if skipped is not None:
        skipped += problems
    elif problems:
        raise DataError(describe_problems(problems, source.name))
    if not prompts:
        raise DataError(f"{source.name}: no user message in any record")
    return prompts


def short_name(seed_dataset: str) -> str:
    """Return the name for output files: `sharegpt`, the stem of a file, the last part of a hub name."""
    return seed_dataset if seed_dataset in SEED_DATASETS else Path(seed_dataset).stem


def _record_id(record: dict[str, object], turns: list[str], system: str | None) -> str:
    """Return the record's id, or a digest of its text."""
    record_id = record.get("id", record.get("question_id"))
    if isinstance(record_id, (str, int)) and record_id != "":
        return str(record_id)
    return hashlib.sha256(json.dumps([system, *turns]).encode()).hexdigest()[:16]


def _with_unique_id(prompt: Prompt, counts: dict[str, int]) -> Prompt:
    """Return the prompt with an id that none had before: `id`, else `id~2`, `id~3`, ...; `counts` is updated."""
    unique = prompt.id
    while unique in counts:
        counts[prompt.id] += 1
        unique = f"{prompt.id}~{counts[prompt.id]}"
    counts[unique] = 1
    return replace(prompt, id=unique)
