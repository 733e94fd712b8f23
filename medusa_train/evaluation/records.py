"""What one measured answer is: plain data. Knows nothing of models, clocks or reports."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medusa_train.evaluation.questions import Question
from medusa_train.inference.traces import Trace
from medusa_train.io import JsonLinesFile, complete_lines, json_line, replace_bytes


class Verdict(str, enum.Enum):
    """How the tree's answer compares with the plain one, token for token."""

    EQUAL = "equal"
    TIE = "tie"  # where they first differ, the logits of both tokens lie within the tie margin of the best
    DIFFERENT = "different"


@dataclass(frozen=True)
class TimedAnswer:
    """One decoded answer and its cost.

    `seconds` is the wall time of the whole call, prefill included; `prefill_seconds` the part of it that ends with
    the first token. `steps` counts decoding passes (the prefill is none); `accepted[i]` is the number of draft
    tokens that step i accepted. `generate` of transformers reports neither steps nor its prefill: both are 0 there.
    """

    tokens: tuple[int, ...]
    seconds: float
    prefill_seconds: float = 0.0
    steps: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def decode_seconds(self) -> float:
        """Wall time after the first token."""
        return self.seconds - self.prefill_seconds


@dataclass
class TurnRecord:
    """One turn (1, 2, ...) of one question: its prompt and the answers of every decoder to that same prompt.

    `asked` is the user's message, `text` the reported answer's, `pieces` the same token by token. `tree` is None in a
    baseline-only run. `others` are further baselines by name. `exact` maps a dtype's name to the comparison of tree
    and plain in it; a dtype that was not run is absent. `trace` is what the heads guessed all along the reported
    answer, where that was looked at.
    """

    question_id: int | str
    category: str
    turn: int
    prompt_ids: tuple[int, ...]
    tree: TimedAnswer | None
    plain: TimedAnswer
    generate: TimedAnswer
    text: str = ""
    exact: dict[str, Verdict] = field(default_factory=dict)
    others: dict[str, TimedAnswer] = field(default_factory=dict)
    asked: str = ""
    pieces: tuple[str, ...] = ()
    trace: Trace | None = None

    @property
    def answer(self) -> TimedAnswer:
        """The answer that is reported: the tree's, or the plain one in a baseline-only run."""
        return self.plain if self.tree is None else self.tree

    @property
    def baselines(self) -> dict[str, TimedAnswer]:
        """What the tree is compared with, by name: the loop with the empty tree, and decoders of transformers."""
        return {"plain": self.plain, "generate": self.generate, **self.others}


@dataclass(frozen=True)
class SkippedTurn:
    """A turn that was not asked, because its prompt and answer do not fit the model's context."""

    question_id: int | str
    turn: int
    prompt_tokens: int


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
        self._file: JsonLinesFile | None = None
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
        header = json_line({"settings": self._settings, "dtype": dtype})
        replace_bytes(self.path, [header, *(json_line(_as_json(turn)) for turns in kept.values() for turn in turns)])
        self._file = JsonLinesFile(self.path)

    def append(self, turn: Turn) -> None:
        """Write one turn; a crash of the process loses none that was appended."""
        if self._file is None:
            raise ValueError("the log was not started")
        self._file.append(_as_json(turn))

    def close(self) -> None:
        """Let go of the file; its turns stay."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """The report is complete: nothing has to be kept."""
        self.close()
        self.path.unlink(missing_ok=True)


def _as_json(turn: Turn) -> dict[str, Any]:
    record = asdict(turn)
    for name in _DERIVED:
        record.pop(name, None)
    return record


def _read(path: Path) -> tuple[dict[str, Any] | None, list[Turn]]:
    """Header and turns up to the first line that is torn; nothing where there is no such file."""
    try:
        lines = [line for _, line in complete_lines(path)]
        header = json.loads(lines[0])
        header["settings"], header["dtype"]
    except (OSError, ValueError, LookupError, TypeError):
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
