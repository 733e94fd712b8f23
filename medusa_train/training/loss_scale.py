"""The factor that keeps float16 gradients within their range. Knows no optimizer and no gradients."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2), with torch's own constants.

    The loss is multiplied by `value` before the backward pass and the gradients divided by it afterwards: small
    gradients would be zero in float16. Where that is too much they are infinite; the step is then left out and the
    scale halved. All values are powers of two, so scaling rounds nothing.

    Attributes:
        value: the factor. good: steps in a row that went well with it.
    """

    WINDOW: ClassVar[int] = 2000

    value: float = 65536.0
    good: int = 0

    def update(self, overflowed: bool) -> bool:
        """Take note of a step's end; return whether the scale was to blame and another try is worth it.

        An overflow that stays when nothing is scaled any more has another cause.
        """
        if overflowed:
            lowered = self.value > 1.0
            self.value, self.good = max(1.0, self.value / 2.0), 0
            return lowered
        self.good += 1
        if self.good == self.WINDOW:
            self.value, self.good = self.value * 2.0, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.value, self.good = float(state["value"]), int(state["good"])
