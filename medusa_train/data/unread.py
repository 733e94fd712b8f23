"""What records carry beside their chats, which nothing reads: counted by name, said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_train.data.record_files import shown_name

#: Unread columns and keys of which a note names so many.
MAX_UNREAD = 12


@dataclass
class Unread:
    """What records carry beside their chats, which nothing reads.

    Attributes:
        columns: names, with the number of records that have each. turn_keys: names, with the number
            of turns. turns: roles of turns that are left out, with their number.
        without_prompt: records that have no message of the user, where only these are read.
    """

    columns: Counter[str] = field(default_factory=Counter)
    turn_keys: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    without_prompt: int = 0

    def count_columns(self, record: Mapping[str, Any], read: Collection[str]) -> None:
        """Count the columns of a record beside those that are read.

        Null is as good as missing: tables have it in the columns of other records.
        """
        self.columns.update(unread_keys(record, read))

    def update(self, other: Unread) -> None:
        """Add what `other` counted."""
        self.columns.update(other.columns)
        self.turn_keys.update(other.turn_keys)
        self.turns.update(other.turns)
        self.without_prompt += other.without_prompt

    def describe(self, name: str) -> list[str]:
        """Return a sentence on the data called `name`; none if all was read."""
        parts = []
        if self.columns:
            parts.append(f"columns {_counted(self.columns)}")
        if self.turn_keys:
            parts.append(f"keys of turns {_counted(self.turn_keys)}")
        if self.turns:
            parts.append(f"turns of {_counted(self.turns)}")
        if self.without_prompt:
            parts.append(f"records without a message of the user ({self.without_prompt:,})")
        if not parts:
            return []
        return [f"{name}: not read: {'; '.join(parts)}"]


def unread_keys(values: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Return the keys beside those that are read whose values are not null."""
    return [str(key) for key, value in values.items() if key not in read and value is not None]


def _counted(names: Counter[str]) -> str:
    """List names with their counts, the most frequent first."""
    ordered = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{shown_name(name)} ({count:,})" for name, count in ordered[:MAX_UNREAD]]
    if len(ordered) > MAX_UNREAD:
        shown.append(f"and {len(ordered) - MAX_UNREAD} more")
    return ", ".join(shown)
