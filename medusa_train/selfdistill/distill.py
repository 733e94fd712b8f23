"""The run: every seed that is not done yet is replayed and written. Knows no command line and loads no model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_train.selfdistill.engines import Answer, Engine
from medusa_train.selfdistill.replay import Replayed, replay
from medusa_train.selfdistill.seeds import Seed
from medusa_train.selfdistill.writer import Writer


@dataclass
class Tally:
    """What a run did, and what an earlier one had done.

    Attributes:
        total: seeds asked for. earlier: of them, finished by an earlier run.
        written: conversations written now; turns: answers in them; cut: of them, written shorter than the seed.
        empty: conversations of which nothing was left.
        dropped: dropped turns by reason ("length", "context", "empty").
        tokens: generated now, dropped answers included.
    """

    total: int = 0
    earlier: int = 0
    written: int = 0
    turns: int = 0
    cut: int = 0
    empty: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> int:
        """Seeds that need nothing more."""
        return self.earlier + self.written + self.empty

    @property
    def seconds(self) -> float:
        """Since this run started."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of this run."""
        return self.tokens / max(self.seconds, 1e-9)


def distill(
    seeds: Sequence[Seed],
    engine: Engine,
    writer: Writer,
    *,
    model: str,
    sampling: dict[str, Any],
    random_seed: int,
    drop_truncated: bool = True,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Replay `seeds` in order and write what comes of them; those in `writer.done` are left out.

    Args:
        model: how the lines name the model. sampling: the settings that every line repeats.
        on_progress: called at the start, after every answer and after every conversation.
    """
    left = [seed for seed in seeds if seed.id not in writer.done]
    tally = Tally(total=len(seeds), earlier=len(seeds) - len(left))

    def count(answer: Answer) -> None:
        tally.tokens += answer.completion_tokens
        on_progress(tally)

    on_progress(tally)
    for seed in left:
        done = replay(seed, engine, random_seed=random_seed, drop_truncated=drop_truncated, on_answer=count)
        _write(done, writer, model, sampling)
        _count(done, tally)
        on_progress(tally)
    return tally


def _write(done: Replayed, writer: Writer, model: str, sampling: dict[str, Any]) -> None:
    dropped = {"dropped": {"reason": done.dropped, "turns": done.dropped_turns}} if done.dropped else {}
    if not done.turns:
        writer.drop({"id": done.seed.id, "seed_id": done.seed.id, **dropped})
        return
    writer.write(
        {
            "id": done.seed.id,
            "seed_id": done.seed.id,
            "model": model,
            "messages": [message.as_dict() for message in done.messages],
            "sampling": sampling,
            "finish_reasons": done.reasons,
            "token_counts": {"prompt": done.prompt_tokens, "completion": done.completion_tokens},
            **dropped,
        }
    )


def _count(done: Replayed, tally: Tally) -> None:
    if done.turns:
        tally.written += 1
        tally.turns += done.turns
    else:
        tally.empty += 1
    if done.dropped is not None:
        tally.dropped[done.dropped] += done.dropped_turns
        tally.cut += bool(done.turns)
