"""All chats of a file or split. Invalid records and unread parts are collected in a report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.conversation import REASONING_TAGS, Conversation, ReasoningTags
from medusa_train.data.json_values import RecordError
from medusa_train.data.record_files import RawRecord
from medusa_train.data.records import normalize
from medusa_train.data.report import DataReport
from medusa_train.data.sources import BUILDERS, LocalFiles, open_source
from medusa_train.errors import DataError
from medusa_train.hub import hub_is_unreachable

MAX_SHOWN_PROBLEMS = 5
#: Number of records of each data set that are checked before torch is imported.
FIRST_RECORDS = 100


class ReadResult(NamedTuple):
    """Conversations in file order, and what was skipped or not read."""

    conversations: list[Conversation]
    report: DataReport


def parse_records(
    parts: Iterable[tuple[str, Iterable[RawRecord]]],
    entry: DatasetConfig,
    *,
    skip_bad: bool,
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] | None = (),
) -> ReadResult:
    """Parse the records of files or splits.

    Args:
        parts: name and records of each file or split.
        skip_bad: list invalid records in the report instead of raising. The result may then have no
            conversation; `with_some` checks that.
        tags, variables: as in `normalize`.

    Returns:
        The conversations and the report, which notes files without records.

    Raises:
        DataError: a file or split has invalid records (unless `skip_bad`). The message covers all
            invalid records of that file.
    """
    conversations: list[Conversation] = []
    report = DataReport()
    for name, records in parts:
        problems = []
        earlier = len(conversations)
        for raw in records:
            try:
                if raw.error is not None:
                    raise RecordError(raw.error)
                conversation = normalize(
                    raw.value, entry, tags=tags, variables=variables, unread=report.unread
                )
                conversations.append(replace(conversation, source=raw.source))
            except RecordError as error:
                problems.append(f"{raw.source}: {error}")
        if problems and not skip_bad:
            raise DataError(describe_problems(problems, name))
        report.skipped += problems
        if not problems and len(conversations) == earlier:
            report.notes.append(f"{name}: no records")
    return ReadResult(conversations, report)


def check_first_records(entries: Iterable[DatasetConfig], *, skip_bad: bool) -> None:
    """Parse the first `FIRST_RECORDS` of each data set that consists of local files, so that a
    problem is reported before torch is imported.

    Data sets that may be on the hub are not opened, since that would fetch them.

    Raises:
        DataError: an invalid record, as in `parse_records`, or a data set without records.
        ConfigError: as in `open_source`.
    """
    for entry in entries:
        is_local = resolve_path(entry.path) is not None or entry.path in BUILDERS
        if not is_local and not hub_is_unreachable():
            continue
        source = open_source(entry)
        if not isinstance(source, LocalFiles):
            continue
        count = 0
        for name, records in source.parts():
            first_records = list(islice(records, FIRST_RECORDS - count))
            count += len(first_records)
            parse_records(
                [(name if count < FIRST_RECORDS else f"{name}, its first records", first_records)],
                entry,
                skip_bad=skip_bad or source.is_public,
                variables=None,  # the tokenizer is not loaded yet
            )
        if not count:
            raise DataError(f"{entry.path}: no conversation to read: no records")


def with_some(result: ReadResult, name: str) -> ReadResult:
    """Return `result`; raise DataError if it has no conversation."""
    if result.conversations:
        return result
    reason = "no records"
    if skipped := result.report.skipped:
        reason = f"all {len(skipped)} records are invalid; the first: {skipped[0]}"
    raise DataError(f"{name}: no conversation to read: {reason}")


def describe_problems(problems: Sequence[str], name: str) -> str:
    """Return an error message on the invalid records of `name`: the first ones, the number of
    others, and a hint.
    """
    lines = [f"{name}: {len(problems)} invalid record{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {line}" for line in first_problems(problems)]
    lines.append("Fix the file, or set skip_bad_records: true to skip such records.")
    return "\n".join(lines)


def first_problems(problems: Sequence[str]) -> list[str]:
    """Return the first `MAX_SHOWN_PROBLEMS` problems, and a line that counts the others."""
    shown = list(problems[:MAX_SHOWN_PROBLEMS])
    num_others = len(problems) - len(shown)
    if num_others:
        shown.append(f"... and {num_others} more")
    return shown
