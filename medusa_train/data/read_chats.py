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
from medusa_train.data.records import normalize
from medusa_train.data.report import DataReport
from medusa_train.data.sources import BUILDERS, HubSplit, LocalFiles, open_source
from medusa_train.errors import DataError
from medusa_train.hub import hub_is_unreachable

MAX_SHOWN_PROBLEMS = 5
#: Number of records of each data set that are checked before torch is imported.
FIRST_RECORDS = 100


class ReadResult(NamedTuple):
    """Conversations in file order, and what was skipped or not read."""

    conversations: list[Conversation]
    report: DataReport


def read_chats(
    source: LocalFiles | HubSplit,
    entry: DatasetConfig,
    *,
    skip_bad: bool,
    tags: ReasoningTags = REASONING_TAGS,
    variables: Collection[str] | None = (),
    most: int | None = None,
) -> ReadResult:
    """Read the chats of files or of a split.

    Args:
        skip_bad: list invalid records in the report instead of raising.
        tags, variables: as in `normalize`.
        most: stop after this many records; None: read all.

    Returns:
        The conversations and the report, which notes files without records.

    Raises:
        DataError: a file or the split has invalid records (unless `skip_bad`; the message covers
            all invalid records of that file), or there is no conversation. That the first records
            are all skipped is no error.
    """
    conversations: list[Conversation] = []
    report = DataReport()
    left = most
    for name, records in source.parts():
        problems = []
        earlier = len(conversations)
        for raw in islice(records, left):
            try:
                if raw.error is not None:
                    raise RecordError(raw.error)
                conversation = normalize(
                    raw.value, entry, tags=tags, variables=variables, unread=report.unread
                )
                conversations.append(replace(conversation, source=raw.source))
            except RecordError as error:
                problems.append(f"{raw.source}: {error}")
        count = len(conversations) - earlier + len(problems)
        if left is not None:
            left -= count
        if problems and not skip_bad:
            place = f"{name}, its first records" if left == 0 else name
            raise DataError(describe_problems(problems, place))
        report.skipped += problems
        if not count:
            report.notes.append(f"{name}: no records")
    if not conversations and (most is None or not report.skipped):
        reason = "no records"
        if skipped := report.skipped:
            reason = f"all {len(skipped)} records are invalid; the first: {skipped[0]}"
        raise DataError(f"{source.name}: no conversation to read: {reason}")
    return ReadResult(conversations, report)


def check_first_records(entries: Iterable[DatasetConfig], *, skip_bad: bool) -> None:
    """Read the first `FIRST_RECORDS` of each data set that consists of local files, so that a
    problem is reported before torch is imported.

    Data sets that may be on the hub are not opened, since that would fetch them.

    Raises:
        DataError: as in `read_chats`.
        ConfigError: as in `open_source`.
    """
    for entry in entries:
        is_local = resolve_path(entry.path) is not None or entry.path in BUILDERS
        if not is_local and not hub_is_unreachable():
            continue
        source = open_source(entry)
        if isinstance(source, LocalFiles):
            read_chats(
                source,
                entry,
                skip_bad=skip_bad or source.is_public,
                variables=None,  # the tokenizer is not loaded yet
                most=FIRST_RECORDS,
            )


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
