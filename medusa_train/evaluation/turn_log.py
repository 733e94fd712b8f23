"""Measured turns on disk while an evaluation runs, so that a stopped one goes on. Knows no model and no figure.

The first line says what was measured and how; each further line is one turn. The file is removed when the report
is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.records import SkippedTurn, TimedAnswer, TurnRecord

Turn = TurnRecord | SkippedTurn

#: Looked up again when a report is made, from the tokens.
_DERIVED = ("exact", "pieces", "trace")


class TurnLog:
    """The turns of one evaluation, appended as they are measured.

    Args:
        path: of the file. settings: everything that the answers and their times depend on, as plain JSON values.

    Attributes:
        dtype: in which the earlier turns were timed; None where there are none.
        turns: the earlier turns, in the order in which they were measured.
        differing: names of the settings in which an earlier file differs; its turns are of no use then.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = dict(settings)
        self._file: TextIO | None = None
        self.dtype: str | None = None
        self.turns: list[Turn] = []
        self.differing: list[str] = []
        header, lines = _read(path)
        if header is None:
            return
        stored = header["settings"]
        self.differing = [key for key in {**stored, **self._settings} if stored.get(key) != self._settings.get(key)]
        if not self.differing and lines:
            self.dtype = header["dtype"]
            self.turns = lines

    def measured(self, questions: Sequence[Question]) -> dict[int | str, list[Turn]]:
        """The earlier turns of the questions of which all turns are there: half a conversation is asked anew."""
        found: dict[int | str, list[Turn]] = {}
        for turn in self.turns:
            found.setdefault(turn.question_id, []).append(turn)
        wanted = {question.question_id: len(question.turns) for question in questions}
        return {name: turns for name, turns in found.items() if len(turns) == wanted.get(name)}

    def start(self, dtype: str, kept: Mapping[int | str, Sequence[Turn]]) -> None:
        """Begin to write: the header and the turns that are taken over; what else was there is gone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8")
        self._write({"settings": self._settings, "dtype": dtype})
        for turns in kept.values():
            for turn in turns:
                self.append(turn)

    def append(self, turn: Turn) -> None:
        """Write one turn; a crash of the process loses none that was appended."""
        record = asdict(turn)
        for name in _DERIVED:
            record.pop(name, None)
        self._write(record)

    def close(self) -> None:
        """Let go of the file; its turns stay."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """The report is complete: nothing has to be kept."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ValueError("the log was not started")
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()


def _read(path: Path) -> tuple[dict[str, Any] | None, list[Turn]]:
    """Header and turns up to the first line that is torn; nothing where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        header = json.loads(lines[0])
        header["settings"], header["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, []
    turns: list[Turn] = []
    for line in lines[1:]:
        try:
            turns.append(_turn(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            break
    return header, turns


def _turn(record: dict[str, Any]) -> Turn:
    if "prompt_tokens" in record:
        return SkippedTurn(**record)
    for name in ("tree", "plain", "generate"):
        record[name] = None if record[name] is None else _answer(record[name])
    record["others"] = {name: _answer(answer) for name, answer in record["others"].items()}
    record["prompt_ids"] = tuple(record["prompt_ids"])
    return TurnRecord(**record)


def _answer(record: dict[str, Any]) -> TimedAnswer:
    return TimedAnswer(**{**record, "tokens": tuple(record["tokens"]), "accepted": tuple(record["accepted"])})
