"""What records carry beside their chats, which nothing reads: counted by name, said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from medusa_train.data.record_files import shown_name

#: Unread columns and keys of which a note names so many.
MAX_UNREAD = 12
#: What is counted, in the order in which a note lists it.
COLUMNS, TURN_KEYS, TURNS = "columns", "keys of turns", "turns of"
WITHOUT_PROMPT = "records without a message of the user"


class Unread(Counter[tuple[str, str]]):
    """How often each name of a kind was left out: `COLUMNS` of records, `TURN_KEYS`, the `TURNS` of
    a role, and records `WITHOUT_PROMPT`, whose name is ''.
    """

    def add(self, kind: str, *names: str) -> None:
        """Count each name once."""
        self.update((kind, name) for name in names)

    def count_columns(self, record: Mapping[str, Any], read: Collection[str]) -> None:
        """Count the columns of a record beside those that are read."""
        self.add(COLUMNS, *unread_keys(record, read))

    def describe(self, name: str) -> list[str]:
        """Return a sentence on the data called `name`; none if all was read."""
        parts = []
        for kind in (COLUMNS, TURN_KEYS, TURNS):
            found = [(count, name) for (of_kind, name), count in self.items() if of_kind == kind]
            if found:
                parts.append(f"{kind} {_counted(found)}")
        if count := self[WITHOUT_PROMPT, ""]:
            parts.append(f"{WITHOUT_PROMPT} ({count:,})")
        if not parts:
            return []
        return [f"{name}: not read: {'; '.join(parts)}"]


def unread_keys(values: Mapping[str, Any], read: Collection[str]) -> Iterable[str]:
    """Return the keys beside those that are read.

    Null is as good as missing: tables have it in the columns of other records.
    """
    return [str(key) for key, value in values.items() if key not in read and value is not None]


def _counted(found: list[tuple[int, str]]) -> str:
    """List names with their counts, the most frequent first."""
    found.sort(key=lambda item: (-item[0], item[1]))
    shown = [f"{shown_name(name)} ({count:,})" for count, name in found[:MAX_UNREAD]]
    if len(found) > MAX_UNREAD:
        shown.append(f"and {len(found) - MAX_UNREAD} more")
    return ", ".join(shown)
