"""A step whose loss or gradient is NaN or infinite: what is said of it. Knows no training loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from medusa_train.errors import MedusaError


class NonFiniteLossError(MedusaError):
    """The loss or the gradient is NaN or infinite; going on would only spread it."""


@dataclass(frozen=True)
class NonFiniteStep:
    """A step that must not change anything.

    Attributes:
        step: its number. loss: of the whole step.
        records: where the loss is not finite those of the micro-batches to blame, else all of the step.
    """

    step: int
    loss: float
    records: list[str]

    @property
    def reason(self) -> str:
        """What was not finite."""
        return f"the loss is {self.loss}" + (", its gradient is not finite" if math.isfinite(self.loss) else "")

    def error(self, skipped: int, good: Path | None) -> NonFiniteLossError:
        """Say why the run ends here.

        Args:
            skipped: steps of this kind that were skipped before it.
            good: the last checkpoint.
        """
        where = f"The last good checkpoint is {good}." if good else "There is no checkpoint yet."
        before = f" ({skipped} like it were skipped before, which is all that max_nonfinite_steps allows)"
        return NonFiniteLossError(
            f"step {self.step}: {self.reason}; the heads were left as they were before it{before if skipped else ''}.\n"
            f"Records in it: {', '.join(self.records)}.\n{where}\n"
            "Look at these records; if they are sound, lower learning_rate, or set bf16: false. "
            "max_nonfinite_steps lets so many such steps of a run be skipped."
        )
