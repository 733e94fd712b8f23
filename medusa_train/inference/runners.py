"""With which sizes a decoding step runs: exact ones, those of compiled passes, or fixed ones.

All padding of decoding is here. Steps of exact sizes do no needless work. Compiled passes read
whole blocks of columns. Steps of fixed shape have few sizes, read their inputs from fixed buffers,
leave their results in fixed buffers and never wait for the device, so that `inference.cuda_graphs`
can replay them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol

from medusa_train.models.compiled import round_up_to_block
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.rounding import ceil_div
from medusa_train.models.target_model import TargetModel

_log = logging.getLogger(__name__)

#: A step from fixed inputs to fixed outputs.
Step = Callable[[], None]


class Replayable(Protocol):
    """What was captured of a step, for example a CUDA graph."""

    def replay(self) -> None:
        """Repeat the step."""


class EagerRunner:
    """Runs steps with exact sizes; where passes are compiled, with the sizes of their programs.

    Args:
        fixed_shape: whether all steps verify the same tree, see `Proposer.fixed_shape`.

    Attributes:
        is_fixed: whether shapes and addresses of a step may not depend on lengths and paths.
    """

    is_fixed = False

    def __init__(self, target_model: TargetModel, *, fixed_shape: bool) -> None:
        self._target_model = target_model
        self._fixed_shape = fixed_shape

    def num_rows(self, active: int, allocated: int) -> int:
        """Return how many rows a pass over `active` of the allocated rows has.

        Compiled programs take a single row only in memory for one.
        """
        if self._target_model.compiled is None or not self._fixed_shape:
            return active
        at_least_two = max(active, 2)
        return min(at_least_two, allocated)

    def path_length(self, longest: int, deepest: int) -> int:
        """Return to how many nodes accepted paths are padded: the longest of them, of at most
        `deepest`.
        """
        return longest

    def key_length(self, positions: int, block: int) -> int:
        """Return how many columns attention reads where `positions` are needed; `block` is for
        steps of fixed shape.
        """
        if self._target_model.compiled is None:
            return positions
        return round_up_to_block(positions)


class FixedShapeRunner:
    """Runs steps of fixed shape one after the other; the subclass in `inference.cuda_graphs`
    captures them and replays what it captured.

    Steps run over 2, 4, 8, ... rows, at most all that are allocated, and read whole blocks of columns, so that few
    graphs are captured. Rows that are not active read their first position, and what they write is
    ignored.
    """

    is_fixed = True

    def num_rows(self, active: int, allocated: int) -> int:
        """Return how many rows a pass over `active` rows has: a power of two, at least 2, at most
        all that are allocated.

        A pass over a single row needs memory for a single row, which compiled programs expect.
        """
        at_least_two = max(active, 2)
        return min(power_of_two(at_least_two), allocated)

    def path_length(self, longest: int, deepest: int) -> int:
        """Return to how many nodes accepted paths are padded: the deepest path of the tree."""
        return deepest

    def key_length(self, positions: int, block: int) -> int:
        """Return how many columns attention reads where `positions` are needed: whole blocks."""
        return ceil_div(positions, block) * block

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        """Run `step`.

        Args:
            graphs: captured so far for the step's buffers. key: stands for shapes and addresses.
        """
        step()


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def choose_runner(
    target_model: TargetModel, draft: Proposer | None
) -> EagerRunner | FixedShapeRunner:
    """Return what runs the steps with a draft; a log line names one whose steps cannot be replayed
    as CUDA graphs.
    """
    fixed_shape = draft is None or draft.fixed_shape
    runner: FixedShapeRunner | None = target_model.step_runner
    if runner is not None and fixed_shape:
        return runner
    if runner is not None:
        name = type(draft).__name__
        _log.info("%s chooses the shape of its trees: its steps run without CUDA graphs", name)
    return EagerRunner(target_model, fixed_shape=fixed_shape)
