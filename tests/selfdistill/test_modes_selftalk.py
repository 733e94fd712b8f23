from __future__ import annotations

from medusa_train.selfdistill.modes import Answer, DropRules, GeneratedChat, selftalk
from medusa_train.selfdistill.prompts import Prompt
from tests.selfdistill.fakes import FakeEngine, drive, said

SEED = Prompt("s1", ("hello", "never asked"), system="be kind")


def run(script: dict[str, Answer] | None = None, rounds: int = 3) -> tuple[GeneratedChat, FakeEngine]:
    engine = FakeEngine(script)
    return drive(selftalk(SEED, random_seed=7, rules=DropRules(), rounds=rounds), engine), engine


def roles(talk: GeneratedChat) -> str:
    return "".join(message.role[0] for message in talk.messages)


def test_the_model_writes_both_roles_for_so_many_rounds() -> None:
    talk, engine = run()
    assert roles(talk) == "s" + "ua" * 3
    assert [request.speaker for request in engine.asked] == ["assistant", "user"] * 2 + ["assistant"]
    assert talk.messages[3].content == "question after answer to hello"
    assert engine.asked[2].messages == tuple(talk.messages[:4])
    assert (talk.turns, talk.dropped) == (3, None)
    assert len({request.seed for request in engine.asked}) == 5


def test_a_question_that_is_cut_off_or_blank_ends_it_with_the_answer_before() -> None:
    for last in (said("and what", "length"), said("", "context"), said("  ")):
        talk, _ = run({"answer to hello": last})
        assert roles(talk) == "sua"
        assert talk.dropped is None


def test_a_question_without_a_kept_answer_is_removed() -> None:
    talk, _ = run({"question after answer to hello": said("too long", "length")})
    assert roles(talk) == "sua"
    assert (talk.dropped, talk.dropped_turns) == ("length", 1)
    assert run({"hello": said("", "stop")})[0].turns == 0


def test_it_ends_with_a_repeated_turn_of_either_role() -> None:
    talk, _ = run({"answer to hello": said("  Hello ")})
    assert roles(talk) == "sua"
    talk, _ = run({"question after answer to hello": said("answer TO  hello")})
    assert (roles(talk), talk.dropped) == ("sua", "repeated")
