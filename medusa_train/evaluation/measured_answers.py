"""Records of measured answers, and the log from which an interrupted measurement is resumed."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from medusa_train.evaluation.questions import Question
from medusa_train.io import (
    JsonLinesFile,
    complete_lines,
    json_line,
    parse_json,
    replace_bytes,
)
from medusa_train.tree_search.fit import Trace


class Verdict(str, enum.Enum):
    """Result of comparing the tree's answer with the plain one, token for token."""

    EQUAL = "equal"
    # where they first differ, both tokens' logits lie within the tie margin of the best
    TIE = "tie"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Score:
    """Whether an answer is correct by `metric`, and the number that was read from it, or how its
    tests ended.
    """

    metric: str
    correct: bool
    detail: str


@dataclass(frozen=True)
class TimedAnswer:
    """One decoded answer and its cost. Answers of a batch share its times and passes equally."""

    tokens: tuple[int, ...]
    seconds: float  # wall time of the whole call
    prefill_seconds: float = 0.0  # until the first token; 0 where it is not reported
    # decoding passes of this answer, without the prefill; 0 for transformers' `generate`
    steps: int = 0
    accepted: tuple[int, ...] = ()  # number of accepted draft tokens per step
    rows: int = 1  # answers in the batch
    # of the whole batch; None for a single answer, whose passes are `steps`
    batch_passes: int | None = None
    # more than one where the prefill also verifies a draft (assisted generation)
    prefill_tokens: int = 1

    @property
    def decode_seconds(self) -> float:
        """Wall time after the first token."""
        return self.seconds - self.prefill_seconds

    @property
    def passes(self) -> float:
        """Decoding passes that `decode_seconds` paid for: a share of the batch's, so that sums
        count each pass once.
        """
        if self.batch_passes is None:
            return self.steps
        return self.batch_passes / self.rows


@dataclass
class TurnRecord:
    """One turn of a question: its prompt, and every decoder's answer to it."""

    question_id: int | str
    category: str
    turn: int  # from 1
    prompt_ids: tuple[int, ...]
    tree: TimedAnswer | None  # None in a baseline-only run
    plain: TimedAnswer
    generate: TimedAnswer | None  # None with `tree: none` or `generate: false`
    text: str = ""  # of the reported answer, with the reasoning tag that the prompt opened
    history: str = ""  # the plain answer, which later turns were asked after
    opened: str = ""  # the reasoning tag at the end of the prompt
    # the tree's and the plain answer, by dtypes that were run
    exact: dict[str, Verdict] = field(default_factory=dict)
    # of `tree` and `plain`, on benches with correct answers
    scores: dict[str, Score] = field(default_factory=dict)
    others: dict[str, TimedAnswer] = field(default_factory=dict)  # of further baselines
    asked: str = ""  # the user's message
    pieces: tuple[str, ...] = ()  # the reported answer token by token
    trace: Trace | None = None  # the heads' guesses along it

    @property
    def answer(self) -> TimedAnswer:
        """The reported answer: the tree's, or the plain one in a baseline-only run."""
        return self.plain if self.tree is None else self.tree

    @property
    def baselines(self) -> dict[str, TimedAnswer]:
        """The baselines by name: the loop with the empty tree, and decoders of transformers."""
        baselines = {"plain": self.plain}
        if self.generate is not None:
            baselines["generate"] = self.generate
        return {**baselines, **self.others}


@dataclass(frozen=True)
class SkippedTurn:
    """A turn that was skipped because prompt and longest answer do not fit the model's context."""

    question_id: int | str
    turn: int
    prompt_tokens: int


Turn = TurnRecord | SkippedTurn
Entry = TypeVar("Entry")

#: Not logged: computed from the tokens when the report is written.
_DERIVED = ("exact", "scores", "pieces", "trace")
_ANSWER: TypeAdapter[Any] = TypeAdapter(TimedAnswer | None)


class MeasurementLog(Generic[Entry]):
    """What was measured, appended to a file from which an interrupted measurement is resumed.

    Args:
        path: the file; created by `start`.
        settings: everything that answers and their times depend on, as plain JSON values.
        parse: returns the entry of a line's JSON; raises ValueError, KeyError or TypeError if it is
            none.
        as_json: returns the JSON value of an entry.

    Attributes: header, entries: of an existing file with the same settings, up to the first invalid
        line; else empty.
        differing: settings in which an existing file differs; nothing of it is used then.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        parse: Callable[[Any], Entry],
        as_json: Callable[[Entry], Any],
    ) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.differing: list[str] = []
        self._settings: dict[str, Any] = json.loads(json_line(settings))
        self._parse = parse
        self._as_json = as_json
        self._file: JsonLinesFile | None = None
        self._read()

    def _read(self) -> None:
        """Read an existing file; one that cannot be read counts as none."""
        try:
            first, *lines = [line for _, line in complete_lines(self.path)]
            header = parse_json(first)
            stored = header["settings"]
            keys = {**stored, **self._settings}
            self.differing = [key for key in keys if stored.get(key) != self._settings.get(key)]
        except (OSError, ValueError, LookupError, TypeError):
            return
        if self.differing:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for line in lines:
                self.entries.append(self._parse(parse_json(line)))
        if self.entries:
            self.header = header

    def resumption(self, what: str, units: str, count: int) -> str | None:
        """Say whether an interrupted measurement, of which `count` units are there, is resumed;
        None without one.
        """
        if self.differing:
            names = ", ".join(self.differing)
            return (
                f"the interrupted {what} in {self.path.parent} had a different {names}: starting"
                " over"
            )
        if not count:
            return None
        return (
            f"resuming an interrupted {what}: {count} {units} are measured (delete {self.path} to"
            " start over)"
        )

    def start(self, kept: Iterable[Entry], **header: Any) -> None:
        """Replace the file by a header and the `kept` entries, and open it for appending."""
        lines = [{"settings": self._settings, **header}]
        lines += [self._as_json(entry) for entry in kept]
        replace_bytes(self.path, [json_line(line) for line in lines])
        self._file = JsonLinesFile(self.path)

    def append(self, entry: Entry) -> None:
        """Append one entry, which survives a crash of the process."""
        if self._file is None:
            raise ValueError("the log was not started")
        self._file.append(self._as_json(entry))

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file: the report is complete."""
        self.close()
        self.path.unlink(missing_ok=True)


def turn_log(path: Path, settings: Mapping[str, Any]) -> MeasurementLog[Turn]:
    """Open the log of an evaluation's turns; its header holds `dtype`, and whether passes were
    `compiled`.
    """
    return MeasurementLog(path, settings, _parse_turn, _as_json)


def completed_turns(
    turns: Iterable[Turn], questions: Sequence[Question]
) -> dict[int | str, list[Turn]]:
    """Return the turns of the questions of which all turns are there, once and in their order, by
    question.
    """
    logged: dict[int | str, list[Turn]] = {}
    for turn in turns:
        logged.setdefault(turn.question_id, []).append(turn)
    completed = {}
    for question in questions:
        found = logged.get(question.question_id, [])
        if [turn.turn for turn in found] == list(range(1, 1 + len(question.turns))):
            completed[question.question_id] = found
    return completed


def _as_json(turn: Turn) -> dict[str, Any]:
    """Return what is logged of a turn."""
    return {name: value for name, value in asdict(turn).items() if name not in _DERIVED}


def _parse_turn(record: dict[str, Any]) -> Turn:
    """Return the turn that `_as_json` was given; raises as `MeasurementLog` wants it."""
    if "prompt_tokens" in record:
        return SkippedTurn(**record)
    values = dict(record)
    for name in ("tree", "plain", "generate"):
        values[name] = _ANSWER.validate_python(record[name])
    values["others"] = {
        name: _ANSWER.validate_python(answer) for name, answer in record["others"].items()
    }
    values["prompt_ids"] = tuple(record["prompt_ids"])
    return TurnRecord(**values)
