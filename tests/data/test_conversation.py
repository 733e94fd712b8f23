import pytest

from medusa_train.data.conversation import Conversation, Message, is_looping, problem_with


def chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in turns)  # type: ignore[arg-type]


def test_each_fault_is_named_with_its_turn() -> None:
    # prompts without answers
    assert problem_with(chat(("system", "s"), ("user", "q"), ("user", "r"))) is None
    assert (
        problem_with(chat(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q")))
        is None
    )
    assert problem_with(()) == "no user turn"
    assert problem_with(chat(("system", "s"))) == "no user turn"
    assert problem_with(chat(("assistant", "a"))) == "turn 1 has the role assistant, expected user"
    twice = problem_with(chat(("system", "s"), ("user", "q"), ("user", "q"), ("assistant", "a")))
    assert twice == "turn 3 has the role user, expected assistant"
    assert (
        problem_with(chat(("user", "q"), ("system", "s")))
        == "turn 2 is a system message; only the first may be"
    )
    assert problem_with(chat(("user", "q"), ("assistant", " \n"))) == "turn 2 (assistant) is empty"
    assert "surrogate" in (problem_with(chat(("user", "\ud800"))) or "")


def test_content_key_tells_contents_apart_and_nothing_else() -> None:
    turns = chat(("user", "q"), ("assistant", "a"))
    key = Conversation("x", turns, "f:1").content_key
    assert key == Conversation("y", turns, "g:2").content_key
    assert key != Conversation("x", chat(("user", "qa"), ("assistant", "")), "f:1").content_key
    assert key != Conversation("x", turns[:1], "f:1").content_key


SENTENCE = "one two three four five six seven eight "


TESTS = (
    "```python\n" + "".join(f"self.assertEqual(add({n}, 1), {n + 1})\n" for n in range(9)) + "```"
)


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        (SENTENCE * 3, True),
        (SENTENCE * 2, False),
        (
            "one two three four five six seven " * 3,
            False,
        ),  # a sequence of seven: one of eight comes twice
        (SENTENCE + "x " + SENTENCE + "y " + SENTENCE, True),
        ("no no no no no no no no no no", True),
        ("ja ja ja ja ja ja ja ja ja", False),  # nine words: a sequence of eight comes twice
        ("-" * 80 + "\n" + "=" * 80, False),
        ("| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |", False),
        ("| --- " * 8 + "|\n" + str([0] * 11), False),  # without a letter: from twelve times
        ("0 " * 19, True),
        ("\u54c8" * 12, True),
        ("", False),
        (SENTENCE * 2 + "```\n" + SENTENCE + "\n```", False),
        (TESTS, False),
        (TESTS.replace("```", "").replace("add", "add(a, b"), True),
        ("```\nwhile True:\n    step()\n" + "print(1)\n" * 2 + "```", False),
        ("```\nwhile True:\n    step()\n" + "print(1)\n" * 3 + "```", True),
        ("```sql\n" + "SELECT a\nFROM b;\n\n" * 3, True),  # an open fence
        ("```\n" + "}\n" * 5 + "```", False),
        ("```\n" + "if a and b or c and d: " * 12 + "```", True),
        ("```\nx\n```\n" + SENTENCE + "```\ny\n```\n" + SENTENCE + SENTENCE, True),
        (list(range(8)) * 3, True),  # tokens
        (list(range(8)) * 2 + list(range(7)), False),
        ([7] * 10, True),
        ([7] * 9, False),
    ],
)
def test_looping_is_a_sequence_of_eight_words_or_tokens_three_times(
    text: str | list[int], looping: bool
) -> None:
    assert is_looping(text) is looping
