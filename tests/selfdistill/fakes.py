"""An engine that answers from a script, for tests of everything around engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from medusa_train.data.conversation import Message
from medusa_train.selfdistill.engines import Answer

Script = Callable[[Sequence[Message], int], Answer]


def said(text: str, reason: str = "stop") -> Answer:
    return Answer(text, reason, prompt_tokens=10, completion_tokens=len(text.split()) + 1)  # type: ignore[arg-type]


class FakeEngine:
    """Answers each prompt by the last user turn; remembers what it was asked."""

    def __init__(self, script: dict[str, Answer] | None = None) -> None:
        self.script = script or {}
        self.asked: list[tuple[list[tuple[str, str]], int]] = []

    def answer(self, messages: Sequence[Message], seed: int) -> Answer:
        self.asked.append(([(m.role, m.content) for m in messages], seed))
        question = messages[-1].content
        return self.script.get(question, said(f"answer to {question}"))
