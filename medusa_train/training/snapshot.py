"""Everything a run needs to go on as if it had never stopped. Knows what belongs in, not how it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa_train.checkpoint.rng import rng_state, set_rng_state
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.base import Draft
from medusa_train.training.engine import Engine
from medusa_train.training.state import TrainState
from medusa_train.training.student import Student


def take_snapshot(draft: Draft, student: Student, engine: Engine, state: TrainState) -> dict[str, Any]:
    """Collect everything that learns, optimizer, schedule, random generators and the place in the run, for saving."""
    return {
        "draft": draft.state_dict(),
        "student": student.state_dict(),
        "engine": engine.state_dict(),
        "rng": rng_state(),
        "run": state.to_json(),
    }


def restore_snapshot(
    snapshot: dict[str, Any], draft: Draft, student: Student, engine: Engine, where: str
) -> TrainState:
    """Put a snapshot back into `draft`, `student`, `engine` and the random generators; return where the run stood.

    Raises:
        CheckpointError: the snapshot is of other heads, or of something else; `where` names it.
    """
    restore_weights(snapshot, draft, student, where)
    with _fitting(where):
        engine.load_state_dict(snapshot["engine"])
        set_rng_state(snapshot["rng"])
        return TrainState.from_json(snapshot["run"])


def restore_weights(snapshot: dict[str, Any], draft: Draft, student: Student, where: str) -> None:
    """Put back what was learnt, and nothing else; raises CheckpointError as `restore_snapshot` does."""
    with _fitting(where):
        draft.load_state_dict(snapshot["draft"])
        student.load_state_dict(snapshot.get("student", {}))


@contextmanager
def _fitting(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{where}: does not fit this run ({reason}).\n"
            "A run goes on with the base_model, heads (medusa_num_heads, medusa_num_layers), adapter and optimizer it "
            "began with."
        ) from error
