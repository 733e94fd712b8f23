"""An engine that answers from a script, for tests of everything around engines."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill.local import HFEngine
from medusa_train.selfdistill.replay import ChatRequest, ChatSteps, GeneratedAnswer, GeneratedChat


def config(**keys: Any) -> SelfDistillConfig:
    return SelfDistillConfig(seed_dataset="prompts.jsonl", base_model="model", **keys)


def said(text: str, reason: str = "stop") -> GeneratedAnswer:
    return GeneratedAnswer(text, reason, prompt_tokens=10, completion_tokens=len(text.split()) + 1)  # type: ignore[arg-type]


class FakeEngine:
    """Answers each prompt by the last message; remembers what it was asked.

    Of several requests, the newest first.
    """

    def __init__(self, script: dict[str, GeneratedAnswer] | None = None, capacity: int = 1) -> None:
        self.script = script or {}
        self.capacity = capacity
        self.asked: list[ChatRequest] = []
        self._waiting: deque[tuple[int, ChatRequest]] = deque()
        self.most = 0  # requests at hand at a time

    def submit(self, request_id: int, request: ChatRequest) -> None:
        self._waiting.append((request_id, request))
        self.most = max(self.most, len(self._waiting))

    def next(self) -> tuple[int, GeneratedAnswer]:
        request_id, request = self._waiting.pop()
        return request_id, self.answer(request)

    generate = HFEngine.generate  # which needs only what is above

    def stats(self) -> Mapping[str, str]:
        return {}

    def answer(self, request: ChatRequest) -> GeneratedAnswer:
        self.asked.append(request)
        last = request.messages[-1].content if request.messages else "nothing"
        verb = "answer to" if request.speaker == "assistant" else "question after"
        return self.script.get(last, said(f"{verb} {last}"))


def drive(steps: ChatSteps, engine: FakeEngine) -> GeneratedChat:
    """One conversation from its first request to its end."""
    request = next(steps)
    while True:
        try:
            request = steps.send(engine.answer(request))
        except StopIteration as end:
            return end.value
