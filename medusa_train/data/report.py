"""Statistics on the records of data sets: how many were skipped, truncated, split or looping, and
which of their parts were not read (counted by name, reported once).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_train.data.record_files import shown_name

#: At most this many reasons for skipped records are listed.
_MAX_KINDS = 5
#: The sentence for each count, in the order in which they are reported.
_SENTENCES = {
    "truncated": "{count} truncated at the end of a turn to fit sequence_len {limit}",
    "too_long": "{count} skipped: their first answer ends beyond sequence_len {limit}",
    "unsupervised": "{count} skipped: no answer to train on",
    "split": (
        "{count} conversation{s} became {rows} rows: their later prompts do not begin with the"
        " tokens of the row before"
    ),
    "ignored_token_ids": (
        "answers whose token_ids were not used, since they are another text in this tokenizer:"
        " {count}"
    ),
    "results_of_user": (
        "chats with tools ({count}): the chat template does not know the role tool: results of"
        " tools are turns of the user"
    ),
    "text_arguments": (
        "chats with tools ({count}): the chat template rejects arguments of tool calls as objects:"
        " it gets them as JSON text"
    ),
    "dropped_content": (
        "chats with tools ({count}): the chat template leaves out the text next to tool calls"
    ),
    "cut_before_turn": (
        "chats with tools ({count}): cut before a turn that the chat template renders differently"
        " after a prompt"
    ),
    "dropped_rows": "{count} rows of long chats with tools left out (max_rows_per_chat)",
}

#: At most this many unread columns and keys in a note.
MAX_UNREAD = 12
#: Kinds of unread parts, in the order in which a note lists them.
COLUMNS, TURN_KEYS, TURNS = "columns", "keys of turns", "turns of"
WITHOUT_PROMPT = "records without a message of the user"


class Unread(Counter[tuple[str, str]]):
    """Counts of unread parts by (kind, name). The kinds: columns of records (`COLUMNS`), keys of
    turns (`TURN_KEYS`), turns of a role (`TURNS`), and records `WITHOUT_PROMPT`, whose name is ''.
    """

    def add(self, kind: str, *names: str) -> None:
        """Count each name once."""
        self.update((kind, name) for name in names)

    def count_columns(self, record: Mapping[str, Any], read: Collection[str]) -> None:
        """Count the columns of a record that have a value and are not in `read`."""
        self.add(COLUMNS, *(key for key in record if key not in read and record[key] is not None))

    def describe(self, name: str) -> list[str]:
        """Return a list with one sentence on what was not read of the data called `name`; an empty
        list if all was read.
        """
        parts = []
        for kind in (COLUMNS, TURN_KEYS, TURNS):
            counts = [(count, name) for (other, name), count in self.items() if other == kind]
            if counts:
                parts.append(f"{kind} {_counted(counts)}")
        if count := self[WITHOUT_PROMPT, ""]:
            parts.append(f"{WITHOUT_PROMPT} ({count:,})")
        if not parts:
            return []
        return [f"{name}: not read: {'; '.join(parts)}"]


def _counted(counts: list[tuple[int, str]]) -> str:
    """Return names with their counts, the most frequent first."""
    counts.sort(key=lambda item: (-item[0], item[1]))
    shown = [f"{shown_name(name)} ({count:,})" for count, name in counts[:MAX_UNREAD]]
    if len(counts) > MAX_UNREAD:
        shown.append(f"and {len(counts) - MAX_UNREAD} more")
    return ", ".join(shown)


@dataclass
class DataReport:
    """Statistics on reading and tokenization, for the user.

    Attributes:
        sequence_len: maximum number of tokens of a row; 0 if no chat was tokenized.
        skipped: `file:line: reason` of each invalid record.
        unread: the parts of the records that were not read.
        counts: counts by name:
            complete, truncated: conversations that fit, and those that were truncated.
            too_long, unsupervised: conversations that were left out.
            split, rows: conversations that became several rows, and the number of these rows.
            answers: answers of the conversations that were kept.
            looping, cut: answers that loop, and answers that a length limit cut off.
            ignored_token_ids: answers whose given tokens were not used.
            dropped_rows: rows of long chats with tools that were left out.
            The others concern chats with tools, see `_SENTENCES`.
        notes: further sentences: first those on files and unread parts, which are stored with the
            examples, then those on this run.
    """

    sequence_len: int = 0
    skipped: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, other: DataReport) -> None:
        """Add the counts, skipped records and notes of another part of the data."""
        self.skipped += other.skipped
        self.unread.update(other.unread)
        self.counts.update(other.counts)
        self.notes += other.notes

    @property
    def looping_share(self) -> float:
        """Share of looping answers."""
        return self.counts["looping"] / max(1, self.counts["answers"])

    def describe_looping(self) -> str:
        """Return a sentence on how many answers loop, and what to do about it."""
        return (
            f"{self.counts['looping']:,} of {self.counts['answers']:,} answers"
            f" ({self.looping_share:.0%}) loop: they repeat the same eight words three times, and"
            " heads learn to repeat. medusa-selfdistill drops such answers (drop_looping);"
            " sampling at a temperature of 0.3 to 0.7 makes fewer of them"
        )

    def describe(self) -> list[str]:
        """Return a sentence for each kind of conversation that was skipped or truncated, and the
        notes.
        """
        sentences = []
        if self.skipped:
            sentences.append(
                f"{len(self.skipped)} invalid records skipped, the first: {self.skipped[0]}"
            )
            # numbers are masked: the same problem in another turn or record is the same reason
            kinds = Counter(re.sub(r"\d+", "N", line.partition(": ")[2]) for line in self.skipped)
            if len(kinds) > 1:
                reasons = [f"{kind} ({count})" for kind, count in kinds.most_common(_MAX_KINDS)]
                more = f"; {len(kinds) - _MAX_KINDS} more" if len(kinds) > _MAX_KINDS else ""
                sentences.append(f"invalid records by reason: {'; '.join(reasons)}{more}")
        for name, sentence in _SENTENCES.items():
            if count := self.counts[name]:
                s = "" if count == 1 else "s"
                rows, limit = self.counts["rows"], self.sequence_len
                sentences.append(sentence.format(count=count, s=s, rows=rows, limit=limit))
        return sentences + self.notes
