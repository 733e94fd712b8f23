"""The run: every seed that is not done yet becomes a conversation and is written. Knows no command line, no model."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_train.selfdistill.engines import Answer, Engine, Request
from medusa_train.selfdistill.seeds import Seed
from medusa_train.selfdistill.talks import Steps, Talk
from medusa_train.selfdistill.writer import Writer


@dataclass
class Tally:
    """What a run did, and what an earlier one had done.

    Attributes:
        total: seeds asked for. earlier: of them, finished by an earlier run.
        written: conversations written now; turns: answers in them; cut: of them, written shorter than the seed.
        looping: answers among those written that loop.
        empty: conversations of which nothing was left.
        dropped: dropped turns by reason ("length", "context", "refused", "empty", "looping", "repeated").
        tokens: generated now, dropped answers included.
    """

    total: int = 0
    earlier: int = 0
    written: int = 0
    turns: int = 0
    cut: int = 0
    looping: int = 0
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

    def count(self, talk: Talk) -> None:
        """Take note of a finished conversation."""
        if talk.turns:
            self.written += 1
            self.turns += talk.turns
        else:
            self.empty += 1
        self.looping += talk.looping
        if talk.dropped is not None:
            self.dropped[talk.dropped] += talk.dropped_turns
            self.cut += bool(talk.turns)


def distill(
    seeds: Sequence[Seed],
    engine: Engine,
    writer: Writer,
    *,
    talk: Callable[[Seed], Steps],
    facts: dict[str, Any],
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Make a conversation of each of `seeds` and write it; those in `writer.done` are left out.

    As many conversations are under way as the engine wants requests at hand. Each is written as soon as it is
    finished; an engine that takes one request at a time writes them in the order of the seeds.

    Args:
        talk: the mode, `replay` or `selftalk` with its settings.
        facts: what every line says beside the conversation: `model`, `sampling`, ...
        on_progress: called at the start, after every answer and after every conversation.
    """
    left = [seed for seed in seeds if seed.id not in writer.done]
    tally = Tally(total=len(seeds), earlier=len(seeds) - len(left))
    coming = iter(enumerate(left))
    underway: dict[int, Steps] = {}
    ready: deque[tuple[int, Request]] = deque()
    asked = 0  # requests that the engine has not answered yet
    on_progress(tally)
    while True:
        while asked < engine.capacity:
            if not ready and (begun := next(coming, None)) is not None:
                ticket, seed = begun
                underway[ticket] = talk(seed)
                ready.append((ticket, next(underway[ticket])))
            if not ready:
                break
            engine.submit(*ready.popleft())
            asked += 1
        if not asked:
            return tally
        ticket, answer = engine.next()
        asked -= 1
        tally.tokens += answer.completion_tokens
        finished = _go_on(ticket, answer, underway, ready)
        on_progress(tally)
        if finished is not None:
            write(finished, writer, facts)
            tally.count(finished)
            on_progress(tally)


def _go_on(ticket: int, answer: Answer, underway: dict[int, Steps], ready: deque[tuple[int, Request]]) -> Talk | None:
    """Hand a conversation its answer: its next request goes to `ready`, or it is finished and returned."""
    try:
        ready.append((ticket, underway[ticket].send(answer)))
    except StopIteration as end:
        del underway[ticket]
        talk: Talk = end.value
        return talk
    return None


def write(talk: Talk, writer: Writer, facts: dict[str, Any]) -> None:
    """Append a conversation, or the note that nothing was left of it."""
    identity = {"id": talk.seed.id, "seed_id": talk.seed.id}
    dropped = {"dropped": {"reason": talk.dropped, "turns": talk.dropped_turns}} if talk.dropped else {}
    if not talk.turns:
        writer.drop({**identity, **dropped})
        return
    facts = dict(facts)
    writer.write(
        {
            **identity,
            "model": facts.pop("model"),
            "messages": [message.as_dict() for message in talk.messages],
            **facts,
            "finish_reasons": talk.reasons,
            "token_counts": {"prompt": talk.prompt_tokens, "completion": talk.completion_tokens},
            **dropped,
        }
    )
