"""Turns of an evaluation with every decoder's answer, and the log from which one is resumed."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, TypeAdapter

from medusa_train.evaluation.questions import Question
from medusa_train.io import JsonLinesFile, complete_lines, json_line, parse_json, replace_bytes
from medusa_train.tree_search.fit import Trace

#: Names of decoders; every further baseline has its own.
TREE = "tree"
PLAIN = "plain"
GENERATE = "generate"


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
class Answer:
    """One decoded answer and its cost. Answers of a batch share its times and passes equally."""

    tokens: tuple[int, ...]
    seconds: float  # wall time of the whole call
    prefill_seconds: float = 0.0  # until the first token; 0 if it is not reported
    # decoding passes of this answer, without the prefill; 0 for transformers' `generate`
    steps: int = 0
    accepted: tuple[int, ...] = ()  # number of accepted draft tokens per step
    rows: int = 1  # answers in the batch
    # of the whole batch; None for a single answer, whose passes are `steps`
    batch_passes: int | None = None
    # more than one if the prefill also verifies a draft (assisted generation)
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
class Turn:
    """One turn of a question: its prompt, and every decoder's answer to it.

    A turn whose prompt and longest answer do not fit the context is skipped and has no answers.

    Attributes:
        turn: from 1.
        answers: by decoder, in the report's order; without a draft there is no `TREE`.
        asked: the user's message.
        text: of the reported answer, with the reasoning tag that the prompt opened.
        history: the plain answer, after which later turns are asked.
        opened: the reasoning tag at the end of the prompt.
        exact: the tree's answer compared with the plain one, by dtypes that were run.
        scores: of `TREE` and `PLAIN`, on benchmarks with correct answers.
        pieces: the reported answer token by token.
        trace: the heads' guesses along it.
    """

    question_id: int | str
    category: str
    turn: int
    prompt_ids: tuple[int, ...]
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: str = ""
    text: str = ""
    history: str = ""
    opened: str = ""
    # computed from the tokens when the report is written, and not logged
    exact: Annotated[dict[str, Verdict], Field(exclude=True)] = field(default_factory=dict)
    scores: Annotated[dict[str, Score], Field(exclude=True)] = field(default_factory=dict)
    pieces: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    trace: Annotated[Trace | None, Field(exclude=True)] = None

    @property
    def skipped(self) -> bool:
        """Whether the turn was not asked."""
        return not self.answers

    @property
    def tree(self) -> Answer | None:
        """The draft's answer; None in a run of baselines alone."""
        return self.answers.get(TREE)

    @property
    def plain(self) -> Answer:
        """The answer of the same loop without a draft."""
        return self.answers[PLAIN]

    @property
    def answer(self) -> Answer:
        """The reported answer: the tree's, or the plain one in a run of baselines alone."""
        return self.answers.get(TREE, self.plain)

    @property
    def compared(self) -> dict[str, Answer]:
        """The answers whose quality is compared: the tree's, if there is one, and the plain one."""
        return {name: self.answers[name] for name in (TREE, PLAIN) if name in self.answers}


TURN = TypeAdapter(Turn)
Entry = TypeVar("Entry")


class MeasurementLog(Generic[Entry]):
    """What was measured, appended to a file from which an interrupted measurement is resumed.

    Args:
        path: the file; created by `start`.
        settings: everything that answers and their times depend on, as plain JSON values.
        entry: reads and writes the JSON value of a line.

    Attributes: header, entries: of an existing file with the same settings, up to the first invalid
        line; else empty.
        differing: settings in which an existing file differs; nothing of it is used then.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], entry: TypeAdapter[Entry]) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.differing: list[str] = []
        self._settings: dict[str, Any] = json.loads(json_line(settings))
        self._entry = entry
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
        with contextlib.suppress(ValueError):
            for line in lines:
                self.entries.append(self._entry.validate_python(parse_json(line)))
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
        lines = [{"settings": self._settings, **header}, *map(self._as_json, kept)]
        replace_bytes(self.path, [json_line(line) for line in lines])
        self._file = JsonLinesFile(self.path)

    def append(self, entry: Entry) -> None:
        """Append one entry, which survives a crash of the process."""
        if self._file is None:
            raise ValueError("the log was not started")
        self._file.append(self._as_json(entry))

    def _as_json(self, entry: Entry) -> Any:
        return self._entry.dump_python(entry, mode="json")

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file: the report is complete."""
        self.close()
        self.path.unlink(missing_ok=True)


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
