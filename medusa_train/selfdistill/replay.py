"""Replay: the user's turns are fed one after the other, the model's own answers being the history.

Knows no engine's inside, no file and no progress.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from medusa_train.data.conversation import Message
from medusa_train.selfdistill.engines import Answer, Engine, Reason
from medusa_train.selfdistill.seeds import Seed

DropReason = Literal["length", "context", "empty"]


@dataclass
class Replayed:
    """A conversation as far as the model came.

    Attributes:
        messages: system prompt, user and assistant in turn; no answer is missing at the end.
        reasons: why each answer ended. prompt_tokens, completion_tokens: per answer.
        dropped: why an answer was dropped with all later turns, or None; dropped_turns: how many that were.
    """

    seed: Seed
    messages: list[Message] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    dropped: DropReason | None = None
    dropped_turns: int = 0

    @property
    def turns(self) -> int:
        """How many answers there are."""
        return len(self.reasons)


def turn_seed(seed: int, conversation: str, turn: int) -> int:
    """The random seed of one answer: a hash of the run's seed, the conversation's id and the turn's number."""
    digest = hashlib.sha256(f"{seed}\x00{conversation}\x00{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: what torch's generators take


def replay(
    seed: Seed,
    engine: Engine,
    *,
    random_seed: int,
    drop_truncated: bool = True,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Replayed:
    """Answer the turns of `seed` (SPEC 2, replay; the reference's defaults).

    An answer that the length limit or the model's context cut off is dropped with all later turns, and earlier
    turns stay; `drop_truncated` false keeps it and goes on. A blank answer is always dropped: nothing is learnt
    from it, and chat formats refuse it.
    """
    done = Replayed(seed)
    if seed.system is not None:
        done.messages.append(Message("system", seed.system))
    for number, text in enumerate(seed.turns):
        asked = Message("user", text)
        answer = engine.answer([*done.messages, asked], turn_seed(random_seed, seed.id, number))
        on_answer(answer)
        done.dropped = _why_dropped(answer, drop_truncated)
        if done.dropped is not None:
            done.dropped_turns = len(seed.turns) - number
            break
        done.messages += [asked, Message("assistant", answer.text)]
        done.reasons.append(answer.reason)
        done.prompt_tokens.append(answer.prompt_tokens)
        done.completion_tokens.append(answer.completion_tokens)
    return done


def _why_dropped(answer: Answer, drop_truncated: bool) -> DropReason | None:
    if answer.reason != "stop" and drop_truncated:
        return answer.reason
    if not answer.text.strip():
        return "context" if answer.reason == "context" else "empty"
    return None
