"""Turns of an evaluation with every decoder's answer; a log of them allows resuming it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter

from medusa_train.evaluation.questions import Question
from medusa_train.tree_search.fit import Trace

#: Names of decoders. Other baselines have names of their own.
TREE = "tree"
PLAIN = "plain"
GENERATE = "generate"


class Verdict(str, enum.Enum):
    """Result of comparing the tree's answer with the plain one, token for token."""

    EQUAL = "equal"
    # at the first position that differs, both tokens' logits are within the tie margin of the best
    TIE = "tie"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Score:
    """Whether an answer is correct by `metric`. `detail` is the number that was read from it, or
    how its tests ended.
    """

    metric: str
    correct: bool
    detail: str


@dataclass(frozen=True)
class TimedAnswer:
    """One decoded answer and its cost. Answers of a batch share its times and passes equally."""

    tokens: tuple[int, ...]
    seconds: float  # wall time of the whole answer; in a batch an equal share of the batch's time
    prefill_seconds: float = 0.0  # time to the first token; 0 if it is not reported
    # number of decoding passes, without the prefill; 0 for transformers' `generate`
    steps: int = 0
    accepted: tuple[int, ...] = ()  # number of accepted draft tokens per step
    rows: int = 1  # number of answers in the batch
    # decoding passes of the whole batch; None for a single answer, whose passes are `steps`
    batch_passes: int | None = None
    # tokens that the prefill adds: more than one if it also verifies a draft (assisted generation)
    prefill_tokens: int = 1

    @property
    def decode_seconds(self) -> float:
        """Wall time after the first token."""
        return self.seconds - self.prefill_seconds

    @property
    def passes(self) -> float:
        """Number of decoding passes that belong to `decode_seconds`. In a batch it is an equal
        share of the batch's passes, so that a sum over answers counts each pass once.
        """
        if self.batch_passes is None:
            return self.steps
        return self.batch_passes / self.rows


@dataclass
class Turn:
    """One turn of a question: its prompt, and every decoder's answer to it.

    A turn whose prompt and longest answer do not fit the context is skipped and has no answers.

    Attributes:
        turn: number of the turn, from 1.
        answers: answers by decoder, in the report's order. Without a draft there is no `TREE`.
        asked: the user's message.
        text: text of the reported answer, beginning with the reasoning tag that the prompt opened.
        history: text of the plain answer, which is the history of later turns.
        opened: the reasoning tag at the end of the prompt.
        batch: id of the first question in the batch of questions that were asked together.
        exact: verdict of comparing the tree's answer with the plain one, by dtype.
        scores: scores of `TREE` and `PLAIN`, for questions that define a correct answer.
        pieces: text of each token of the reported answer.
        trace: the heads' guesses along the reported answer.
    """

    question_id: int | str
    category: str
    turn: int
    prompt_ids: tuple[int, ...]
    answers: dict[str, TimedAnswer] = field(default_factory=dict)
    asked: str = ""
    text: str = ""
    history: str = ""
    opened: str = ""
    batch: int | str = ""
    # computed from the tokens when the report is written, and not logged
    exact: Annotated[dict[str, Verdict], Field(exclude=True)] = field(default_factory=dict)
    scores: Annotated[dict[str, Score], Field(exclude=True)] = field(default_factory=dict)
    pieces: Annotated[tuple[str, ...], Field(exclude=True)] = ()
    trace: Annotated[Trace | None, Field(exclude=True)] = None

    @property
    def skipped(self) -> bool:
        """Whether the turn was skipped, because it did not fit the context."""
        return not self.answers

    @property
    def tree(self) -> TimedAnswer | None:
        """The answer with the draft; None in a run with only baselines."""
        return self.answers.get(TREE)

    @property
    def plain(self) -> TimedAnswer:
        """The answer of the same decoding loop without a draft."""
        return self.answers[PLAIN]

    @property
    def answer(self) -> TimedAnswer:
        """The reported answer: the tree's, or the plain one in a run with only baselines."""
        return self.answers.get(TREE, self.plain)

    @property
    def compared(self) -> dict[str, TimedAnswer]:
        """The answers whose quality is compared: the tree's, if there is one, and the plain one."""
        return {name: self.answers[name] for name in (TREE, PLAIN) if name in self.answers}


TURN = TypeAdapter(Turn)


def completed_turns(
    turns: Iterable[Turn], questions: Sequence[Question]
) -> dict[int | str, list[Turn]]:
    """Return the turns by question id, only of questions whose turns are all in `turns`, each once
    and in order.
    """
    logged: dict[int | str, list[Turn]] = {}
    for turn in turns:
        logged.setdefault(turn.question_id, []).append(turn)
    completed = {}
    for question in questions:
        found = logged.get(question.question_id, [])
        if [turn.turn for turn in found] == [*range(1, 1 + len(question.turns))]:
            completed[question.question_id] = found
    return completed
