from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from medusa_train.data.conversation import Message
from medusa_train.selfdistill.modes import DropRules, question
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt, read_prompts
from medusa_train.selfdistill.run import distill, summary
from tests.selfdistill.fakes import FakeEngine, drive, said

ASK = partial(question, random_seed=7, rules=DropRules())


def test_the_model_is_asked_for_a_first_user_message() -> None:
    engine = FakeEngine()
    chats = [drive(ASK(Prompt(name, ())), engine) for name in ("a", "b")]
    assert [chat.messages for chat in chats] == [[Message("user", "question after nothing")]] * 2
    assert [(request.messages, request.speaker) for request in engine.asked] == [((), "user")] * 2
    assert len({request.seed for request in engine.asked}) == 2
    assert not chats[0].is_empty


def test_a_truncated_or_blank_question_is_dropped() -> None:
    for text, reason, why in (("and so on", "length", "length"), (" ", "stop", "empty")):
        chat = drive(ASK(Prompt("a", ())), FakeEngine({"nothing": said(text, reason)}))
        assert chat.is_empty
        assert (chat.dropped, chat.dropped_turns) == (why, 1)


def test_the_output_is_read_as_prompts(tmp_path: Path) -> None:
    out = tmp_path / "questions.jsonl"
    prompts = [Prompt("a", ()), Prompt("b", ())]
    with OutputWriter(out, {"model": "m"}) as writer:
        stats = distill(prompts, FakeEngine(), writer, mode=ASK, metadata={"model": "m", "mode": "questions"})
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert list(lines[0]) == ["id", "seed_id", "model", "messages", "mode"]
    assert [(prompt.id, prompt.turns) for prompt in read_prompts(out)] == [
        ("a", ("question after nothing",)),
        ("b", ("question after nothing",)),
    ]
    assert (stats.written, stats.turns, stats.empty, stats.finished) == (2, 0, 0, 2)
    assert "answers in them" not in list(summary(stats, {}).columns[0].cells)
