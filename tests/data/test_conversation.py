from medusa_train.data.conversation import Conversation, Message, problem_with


def chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in turns)  # type: ignore[arg-type]


def test_legal_orders_have_no_problem() -> None:
    assert problem_with(chat(("user", "q"))) is None
    assert problem_with(chat(("user", "q"), ("assistant", "a"))) is None
    assert problem_with(chat(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q"))) is None


def test_a_seed_is_one_or_more_turns_of_the_users() -> None:
    assert problem_with(chat(("system", "s"), ("user", "q"), ("user", "r"), ("user", "s"))) is None


def test_each_fault_is_named_with_its_turn() -> None:
    assert problem_with(()) == "it has no turn of the user's"
    assert problem_with(chat(("system", "s"))) == "it has no turn of the user's"
    first = problem_with(chat(("assistant", "a")))
    assert first == "turn 1 is from the assistant where the user's was expected"
    twice = problem_with(chat(("system", "s"), ("user", "q"), ("user", "q"), ("assistant", "a")))
    assert twice == "turn 3 is from the user where the assistant's was expected"
    late = problem_with(chat(("user", "q"), ("system", "s")))
    assert late == "turn 2 is a system message; only the first may be"
    assert problem_with(chat(("user", "q"), ("assistant", " \n"))) == "turn 2 (assistant) is empty"
    assert "surrogate" in (problem_with(chat(("user", "\ud800"))) or "")


def test_content_key_tells_contents_apart_and_nothing_else() -> None:
    turns = chat(("user", "q"), ("assistant", "a"))
    key = Conversation("x", turns, "f:1").content_key
    assert key == Conversation("y", turns, "g:2").content_key
    assert key != Conversation("x", chat(("user", "qa"), ("assistant", "")), "f:1").content_key
    assert key != Conversation("x", turns[:1], "f:1").content_key


def test_first_keeps_identity() -> None:
    cut = Conversation("x", chat(("user", "q"), ("assistant", "a"), ("user", "r")), "f:1").first(2)
    assert (cut.id, cut.source, [m.content for m in cut.messages]) == ("x", "f:1", ["q", "a"])
