from typing import Any

import pytest

from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.replay import (
    GeneratedAnswer,
    GeneratedChat,
    replay,
    selftalk,
    turn_seed,
)
from tests.selfdistill.fakes import FakeEngine, config, drive, said

# Replay

SEED = Prompt("s1", ("one", "two", "three"))


def run(engine: FakeEngine, prompt: Prompt = SEED, **keys: Any) -> GeneratedChat:
    return drive(replay(prompt, config(**{"seed": 7, **keys})), engine)


def contents(done: GeneratedChat) -> list[str]:
    return [message.content for message in done.messages]


def reasons(done: GeneratedChat) -> list[str]:
    return [answer.finish_reason for answer in done.answers]


def test_own_answers_are_the_history() -> None:
    done = run(engine := FakeEngine())
    assert contents(done) == [
        "one",
        "answer to one",
        "two",
        "answer to two",
        "three",
        "answer to three",
    ]
    assert [message.role for message in done.messages] == ["user", "assistant"] * 3
    third_prompt = [message.content for message in engine.asked[2].messages]
    assert third_prompt == ["one", "answer to one", "two", "answer to two", "three"]
    assert reasons(done) == ["stop"] * 3
    assert [answer.completion_tokens for answer in done.answers] == [4, 4, 4]
    assert (done.dropped, done.dropped_turns) == (None, 0)


def test_a_system_prompt_leads() -> None:
    done = run(engine := FakeEngine(), Prompt("s", ("one",), system="be brief"))
    assert contents(done) == ["be brief", "one", "answer to one"]
    assert engine.asked[0].messages[0].as_dict() == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("reason", ["length", "context"])
def test_a_cut_answer_is_dropped_with_all_later_turns_and_earlier_turns_stay(reason: str) -> None:
    done = run(engine := FakeEngine({"two": said("cut off", reason)}))
    assert contents(done) == ["one", "answer to one"]
    assert (done.dropped, done.dropped_turns) == (reason, 2)
    assert len(engine.asked) == 2


def test_a_cut_answer_is_kept_when_asked_for() -> None:
    done = run(FakeEngine({"two": said("cut off", "length")}), drop_truncated=False)
    assert contents(done)[3:] == ["cut off", "three", "answer to three"]
    assert reasons(done) == ["stop", "length", "stop"]
    assert done.dropped is None


@pytest.mark.parametrize(
    ("reason", "why"),
    [("stop", "empty"), ("context", "context"), ("length", "empty"), ("refused", "refused")],
)
def test_a_blank_answer_is_always_dropped(reason: str, why: str) -> None:
    done = run(FakeEngine({"one": said(" \n", reason)}), drop_truncated=False)
    assert (done.answers, done.dropped, done.dropped_turns) == ([], why, 3)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_looping_answer_is_dropped_or_counted(reason: str) -> None:
    dropped = run(engine := FakeEngine({"two": said("a b c d e f g h " * 3, reason)}))
    assert (len(dropped.answers), dropped.looping) == (1, 1)
    assert (dropped.dropped, dropped.dropped_turns) == ("looping", 2)
    kept = run(engine, drop_truncated=False, drop_looping=False)
    assert (len(kept.answers), kept.looping, kept.dropped) == (3, 1, None)


def test_each_turn_of_each_conversation_has_its_own_random_seed() -> None:
    engine = FakeEngine()
    run(engine)
    run(engine, Prompt("s2", ("one",)))
    run(engine, seed=8)
    seeds = [request.seed for request in engine.asked]
    assert len(set(seeds)) == 7
    assert seeds[0] == turn_seed(7, "s1", 0)
    assert all(0 <= seed < 2**63 for seed in seeds)


# Self-talk

TALK = Prompt("s1", ("hello", "never asked"), system="be kind")


def talk_of(
    script: dict[str, GeneratedAnswer] | None = None, rounds: int = 3
) -> tuple[GeneratedChat, FakeEngine]:
    engine = FakeEngine(script)
    return drive(selftalk(TALK, config(seed=7, rounds=rounds)), engine), engine


def roles(talk: GeneratedChat) -> str:
    return "".join(message.role[0] for message in talk.messages)


def test_the_model_writes_both_roles_for_so_many_rounds() -> None:
    talk, engine = talk_of()
    assert roles(talk) == "s" + "ua" * 3
    assert [request.speaker for request in engine.asked] == ["assistant", "user"] * 2 + [
        "assistant"
    ]
    assert talk.messages[3].content == "question after answer to hello"
    assert engine.asked[2].messages == tuple(talk.messages[:4])
    assert (len(talk.answers), talk.dropped) == (3, None)
    assert len({request.seed for request in engine.asked}) == 5


def test_a_question_that_is_cut_off_or_blank_ends_it_with_the_answer_before() -> None:
    for last in (said("and what", "length"), said("", "context"), said("  ")):
        talk, _ = talk_of({"answer to hello": last})
        assert roles(talk) == "sua"
        assert talk.dropped is None


def test_a_question_without_a_kept_answer_is_removed() -> None:
    talk, _ = talk_of({"question after answer to hello": said("too long", "length")})
    assert roles(talk) == "sua"
    assert (talk.dropped, talk.dropped_turns) == ("length", 1)
    assert talk_of({"hello": said("", "stop")})[0].answers == []


def test_it_ends_with_a_repeated_turn_of_either_role() -> None:
    talk, _ = talk_of({"answer to hello": said("  Hello ")})
    assert roles(talk) == "sua"
    talk, _ = talk_of({"question after answer to hello": said("answer TO  hello")})
    assert (roles(talk), talk.dropped) == ("sua", "repeated")
