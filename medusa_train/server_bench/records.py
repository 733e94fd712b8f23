"""Records of what a server answered and when, and the log from which an interrupted measurement is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from medusa_train.io import JsonLinesFile, complete_lines, json_line, replace_bytes
from medusa_train.server_bench.draft_counts import DraftCounts


@dataclass(frozen=True)
class ServedAnswer:
    """One turn of a question, answered by a server.

    Attributes:
        turn: counted from 1.
        repeat: how often the question was asked before at this concurrency; greedy answers are equal.
        tokens: length by the server's `usage`.
        started: seconds from the beginning of the block to the request.
        first_token: seconds from the request to the first text; None for an empty answer.
        seconds: seconds from the request to the end of the answer.
    """

    question_id: int | str
    turn: int
    repeat: int
    text: str
    tokens: int
    started: float
    first_token: float | None
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """The answers of one server to one block of conversations.

    Attributes:
        answers: in the order in which they ended.
        skipped: question and turn of prompts that do not fit into the context; their conversations end before them.
        drafts: difference of the server's counters; None if it has none.
    """

    answers: tuple[ServedAnswer, ...]
    skipped: tuple[tuple[int | str, int], ...] = ()
    drafts: DraftCounts | None = None


class Block(NamedTuple):
    """Key of a block: the servers that ran at the same time, the concurrency, and the block's number."""

    session: str
    concurrency: int
    number: int


class MeasurementLog:
    """The measured blocks, appended to a file as they are finished.

    Args:
        path: the file; created by `start`.
        settings: everything that answers and their times depend on, as plain JSON values.

    Attributes:
        blocks: measurements by block and name of the server, of an existing file with the same settings.
        notes: remarks on them, for the report.
        differing: settings in which an existing file differs; its blocks are not used then.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings: dict[str, Any] = json.loads(json_line(settings))
        self._file: JsonLinesFile | None = None
        self.blocks: dict[Block, dict[str, Measurement]] = {}
        self.notes: list[str] = []
        self.differing: list[str] = []
        self._lines: list[bytes] = []
        try:
            lines = [line for _, line in complete_lines(path)]
            stored = json.loads(lines[0])["settings"]
        except (OSError, ValueError, LookupError, TypeError):
            return
        self.differing = [key for key in {**stored, **self._settings} if stored.get(key) != self._settings.get(key)]
        if not self.differing:
            self._read(lines[1:])

    def start(self) -> None:
        """Replace the file by a header and the blocks that were read, and open it for appending."""
        replace_bytes(self.path, [json_line({"settings": self._settings}), *self._lines])
        self._file = JsonLinesFile(self.path)

    def append(self, block: Block, measured: Mapping[str, Measurement]) -> None:
        """Append one block, which survives a crash of the process."""
        self.blocks[block] = dict(measured)
        self._write({"block": block, "measured": {name: asdict(value) for name, value in measured.items()}})

    def note(self, text: str) -> None:
        """Append a remark, once."""
        if text not in self.notes:
            self.notes.append(text)
            self._write({"note": text})

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file: the report is complete."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ValueError("the log was not started")
        self._file.append(record)

    def _read(self, lines: list[bytes]) -> None:
        """Read the lines up to the first invalid one."""
        for line in lines:
            try:
                record = json.loads(line)
                if "note" in record:
                    self.notes.append(record["note"])
                else:
                    measured = {name: _measurement(value) for name, value in record["measured"].items()}
                    self.blocks[Block(*record["block"])] = measured
            except (ValueError, KeyError, TypeError):
                return
            self._lines.append(line)


def _measurement(record: Mapping[str, Any]) -> Measurement:
    drafts = record["drafts"]
    return Measurement(
        tuple(ServedAnswer(**answer) for answer in record["answers"]),
        tuple((question, turn) for question, turn in record["skipped"]),
        None if drafts is None else DraftCounts(**{**drafts, "accepted": tuple(drafts["accepted"])}),
    )
