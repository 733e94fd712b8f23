from __future__ import annotations

import pytest

from medusa_train.selfdistill.modes import DropRules, GeneratedChat, replay, turn_seed
from medusa_train.selfdistill.prompts import Prompt
from tests.selfdistill.fakes import FakeEngine, drive, said

SEED = Prompt("s1", ("one", "two", "three"))
KEEP_CUT = DropRules(drop_truncated=False)


def run(engine: FakeEngine, seed: Prompt = SEED, random_seed: int = 7, rules: DropRules = DropRules()) -> GeneratedChat:
    return drive(replay(seed, random_seed=random_seed, rules=rules), engine)


def contents(done: GeneratedChat) -> list[str]:
    return [message.content for message in done.messages]


def test_own_answers_are_the_history() -> None:
    engine = FakeEngine()
    done = run(engine)
    assert contents(done) == ["one", "answer to one", "two", "answer to two", "three", "answer to three"]
    assert [message.role for message in done.messages] == ["user", "assistant"] * 3
    third_prompt = [message.content for message in engine.asked[2].messages]
    assert third_prompt == ["one", "answer to one", "two", "answer to two", "three"]
    assert done.finish_reasons == ["stop"] * 3
    assert done.completion_tokens == [4, 4, 4]
    assert (done.dropped, done.dropped_turns) == (None, 0)


def test_a_system_prompt_leads() -> None:
    engine = FakeEngine()
    done = run(engine, Prompt("s", ("one",), system="be brief"))
    assert contents(done) == ["be brief", "one", "answer to one"]
    assert engine.asked[0].messages[0].as_dict() == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("reason", ["length", "context"])
def test_a_cut_answer_is_dropped_with_all_later_turns_and_earlier_turns_stay(reason: str) -> None:
    engine = FakeEngine({"two": said("cut off", reason)})
    done = run(engine)
    assert contents(done) == ["one", "answer to one"]
    assert (done.dropped, done.dropped_turns) == (reason, 2)
    assert len(engine.asked) == 2


def test_a_cut_answer_is_kept_when_asked_for() -> None:
    done = run(FakeEngine({"two": said("cut off", "length")}), rules=KEEP_CUT)
    assert contents(done)[3:] == ["cut off", "three", "answer to three"]
    assert done.finish_reasons == ["stop", "length", "stop"]
    assert done.dropped is None


@pytest.mark.parametrize(
    ("reason", "why"), [("stop", "empty"), ("context", "context"), ("length", "empty"), ("refused", "refused")]
)
def test_a_blank_answer_is_always_dropped(reason: str, why: str) -> None:
    done = run(FakeEngine({"one": said(" \n", reason)}), rules=KEEP_CUT)
    assert (done.turns, done.dropped, done.dropped_turns) == (0, why, 3)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_looping_answer_is_dropped_or_counted(reason: str) -> None:
    engine = FakeEngine({"two": said("a b c d e f g h " * 3, reason)})
    dropped = run(engine)
    assert (dropped.turns, dropped.looping, dropped.dropped, dropped.dropped_turns) == (1, 1, "looping", 2)
    kept = run(engine, rules=DropRules(drop_truncated=False, drop_looping=False))
    assert (kept.turns, kept.looping, kept.dropped) == (3, 1, None)


def test_each_turn_of_each_conversation_has_its_own_random_seed() -> None:
    engine = FakeEngine()
    run(engine)
    run(engine, Prompt("s2", ("one",)))
    run(engine, random_seed=8)
    seeds = [request.seed for request in engine.asked]
    assert len(set(seeds)) == 7
    assert seeds[0] == turn_seed(7, "s1", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)
