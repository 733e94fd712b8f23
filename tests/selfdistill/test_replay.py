from __future__ import annotations

import pytest

from medusa_train.selfdistill.replay import replay, turn_seed
from medusa_train.selfdistill.seeds import Seed
from tests.selfdistill.fakes import FakeEngine, said

SEED = Seed("s1", ("one", "two", "three"))


def contents(done) -> list[str]:
    return [message.content for message in done.messages]


def test_own_answers_are_the_history() -> None:
    engine = FakeEngine()
    done = replay(SEED, engine, random_seed=7)
    assert contents(done) == ["one", "answer to one", "two", "answer to two", "three", "answer to three"]
    assert [message.role for message in done.messages] == ["user", "assistant"] * 3
    third_prompt = [text for _, text in engine.asked[2][0]]
    assert third_prompt == ["one", "answer to one", "two", "answer to two", "three"]
    assert done.reasons == ["stop"] * 3
    assert done.completion_tokens == [4, 4, 4]
    assert (done.dropped, done.dropped_turns) == (None, 0)


def test_a_system_prompt_leads() -> None:
    engine = FakeEngine()
    done = replay(Seed("s", ("one",), system="be brief"), engine, random_seed=7)
    assert contents(done) == ["be brief", "one", "answer to one"]
    assert engine.asked[0][0][0] == ("system", "be brief")


@pytest.mark.parametrize("reason", ["length", "context"])
def test_a_cut_answer_is_dropped_with_all_later_turns_and_earlier_turns_stay(reason: str) -> None:
    engine = FakeEngine({"two": said("cut off", reason)})
    done = replay(SEED, engine, random_seed=7)
    assert contents(done) == ["one", "answer to one"]
    assert (done.dropped, done.dropped_turns) == (reason, 2)
    assert len(engine.asked) == 2


def test_a_cut_answer_is_kept_when_asked_for() -> None:
    engine = FakeEngine({"two": said("cut off", "length")})
    done = replay(SEED, engine, random_seed=7, drop_truncated=False)
    assert contents(done)[3:] == ["cut off", "three", "answer to three"]
    assert done.reasons == ["stop", "length", "stop"]
    assert done.dropped is None


@pytest.mark.parametrize(("reason", "why"), [("stop", "empty"), ("context", "context"), ("length", "empty")])
def test_a_blank_answer_is_always_dropped(reason: str, why: str) -> None:
    engine = FakeEngine({"one": said(" \n", reason)})
    done = replay(SEED, engine, random_seed=7, drop_truncated=False)
    assert (done.turns, done.dropped, done.dropped_turns) == (0, why, 3)


def test_each_turn_of_each_conversation_has_its_own_random_seed() -> None:
    engine = FakeEngine()
    replay(SEED, engine, random_seed=7)
    replay(Seed("s2", ("one",)), engine, random_seed=7)
    replay(SEED, engine, random_seed=8)
    seeds = [seed for _, seed in engine.asked]
    assert len(set(seeds)) == 7
    assert seeds[0] == turn_seed(7, "s1", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)
