"""How far a run has got, as plain numbers that JSON keeps to the bit. Knows no tensors and no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class Window:
    """Sums over the optimizer steps since the last log line; in checkpoints, so that a resumed run logs the same.

    `lr` is no sum: it is the learning rate of the last step. `overscaled` steps changed nothing, because their float16
    gradients were scaled too far; they count as steps and have no norm.
    """

    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    correct: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    lm_ce: float = 0.0
    lm_kl: float = 0.0
    lm_count: int = 0
    overscaled: int = 0

    def add_lm(self, ce: float, kl: float, count: int) -> None:
        """Add one micro-batch's sums of the backbone's own loss, nats, over `count` targets."""
        self.lm_ce += ce
        self.lm_kl += kl
        self.lm_count += count

    def lm(self) -> dict[str, float]:
        """Mean cross-entropy against the labels and KL to the teacher, nats; nothing where the backbone is frozen."""
        if not self.lm_count:
            return {}
        return {"lm_loss": self.lm_ce / self.lm_count, "lm_kl": self.lm_kl / self.lm_count}

    def add_heads(self, correct: Sequence[int], counts: Sequence[int], known: Sequence[int]) -> None:
        """Add one step's right top-1 guesses, valid targets, and those of them that the vocabulary holds, per head."""
        self.correct = _added(self.correct, correct)
        self.counts = _added(self.counts, counts)
        self.known = _added(self.known, known)

    def outside(self) -> dict[str, float]:
        """Share of valid targets that a reduced vocabulary lacks, so that no head learnt them; nothing if none."""
        total, known = sum(self.counts), sum(self.known)
        return {"outside_vocabulary": 1.0 - known / total} if known < total else {}

    def top1(self) -> list[float]:
        """Share of valid targets that each head's first guess hits; 0 where there were none."""
        return [c / n if n else 0.0 for c, n in zip(self.correct, self.counts, strict=True)]


@dataclass
class TrainState:
    """Place in the run: `step` optimizer steps are done.

    `data` is the loader's own place (its `state_dict`), `best_loss` the lowest held-out objective (nats), at
    `best_step`; `evals_since_best` serves early stopping; `evaluated` is the last step that was evaluated, `tree` the
    content of the tree.json that it gave.
    `tokens` and `seconds` (of training steps alone) count the whole run, and so does `skipped`: steps that changed
    nothing because their loss or gradient was not finite.
    """

    step: int = 0
    epoch: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0
    evaluated: int = 0
    tree: dict[str, Any] | None = None
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    window: Window = field(default_factory=Window)

    def note_eval(self, loss: float) -> bool:
        """Remember a held-out objective measured now; True when it is the best so far."""
        self.evaluated = self.step
        if self.best_loss is not None and loss >= self.best_loss:
            self.evals_since_best += 1
            return False
        self.best_loss, self.best_step, self.evals_since_best = loss, self.step, 0
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        """Take back what `to_json` gave, also after a trip through a JSON file."""
        known = {f.name for f in fields(cls)} - {"window"}
        return cls(
            **{name: values[name] for name in known if name in values}, window=Window(**values.get("window", {}))
        )


def _added(left: list[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)
