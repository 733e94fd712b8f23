"""What one measured answer is: plain data. Knows nothing of models, clocks or reports."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from medusa_train.inference.ranks import Trace


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
