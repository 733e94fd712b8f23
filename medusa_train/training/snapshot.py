"""Everything a run needs to go on as if it had never stopped. Knows what belongs in, not how it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa_train.checkpoint.rng import rng_state, set_rng_state
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.base import Draft
from medusa_train.training.distributed import ALONE, World
from medusa_train.training.engine import Engine
from medusa_train.training.state import TrainState
from medusa_train.training.student import Student


def take_snapshot(
    draft: Draft, student: Student, engine: Engine, state: TrainState, world: World = ALONE
) -> dict[str, Any]:
    """Collect everything that learns, optimizer, schedule, random generators and the place in the run, for saving.

    All processes of `world` take it together; rank 0's is whole.
    """
    first, *others = world.gather(rng_state())
    return {
        "draft": draft.state_dict(),
        "student": student.state_dict(),
        "engine": engine.state_dict(),
        "rng": first,
        **({"rng_of_others": others} if others else {}),
        "run": state.to_json(),
    }


def restore_weights(snapshot: dict[str, Any], draft: Draft, student: Student, where: str) -> None:
    """Put back what was learnt, and nothing else.

    Raises:
        CheckpointError: the snapshot is of other heads, or of something else; `where` names it.
    """
    with _fitting(where):
        draft.load_state_dict(snapshot["draft"])
        student.load_state_dict(snapshot.get("student", {}))


def restore_place(snapshot: dict[str, Any], engine: Engine, where: str, world: World = ALONE) -> TrainState:
    """Put back the rest: optimizer, schedule, this process's random generators; return where the run stood.

    Where there are more processes than took the snapshot, the added ones keep the random numbers that they have.

    Raises:
        CheckpointError: the snapshot is of something else; `where` names it.
    """
    with _fitting(where):
        engine.load_state_dict(snapshot["engine"])
        generators = random_states(snapshot)
        if world.rank < len(generators):
            set_rng_state(generators[world.rank])
        return TrainState.from_json(snapshot["run"])


def random_states(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """The random generators' states, one for each process that took the snapshot."""
    return [snapshot["rng"], *snapshot.get("rng_of_others", [])]


@contextmanager
def _fitting(where: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{where}: does not fit this run ({reason}).\n"
            "A run goes on with the base_model, draft, heads (medusa_num_heads, medusa_num_layers, medusa_vocab_size; "
            "other drafts: their section), adapter and optimizer it began with."
        ) from error
