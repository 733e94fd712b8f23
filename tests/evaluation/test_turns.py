from pathlib import Path
from typing import Any

import pytest

from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.turns import (
    TURN,
    TimedAnswer,
    Turn,
    completed_turns,
)
from medusa_train.json_lines import MeasurementLog
from tests.evaluation.make_turn import make_turn

SETTINGS = {"bench": "small", "tree": [[0], [0, 0]], "threads": 2}
QUESTIONS = [
    Question(1, "a", ("q", "r"), ""),
    Question("two", "a", ("q",), ""),
    Question(3, "a", ("q", "r"), ""),
]


def turn(question: int | str, number: int) -> Turn:
    answer = TimedAnswer((5, 6, 7), 0.25, 0.125, 2, (1, 0))
    others = {"prompt_lookup": TimedAnswer((5, 6, 7), 0.5)}
    return make_turn(
        question,
        "a",
        number,
        (1, 2),
        answer,
        answer,
        TimedAnswer((5,), 0.5),
        "Ja — ê",
        others=others,
    )


def open_log(path: Path, **changed: Any) -> MeasurementLog[Turn]:
    return MeasurementLog(path, {**SETTINGS, **changed}, TURN)


def write(path: Path, *turns: Turn) -> None:
    log = open_log(path)
    log.start([], dtype="bfloat16", compiled=False)
    for one in turns:
        log.append(one)
    log.close()


def test_turns_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "turns.jsonl"
    turns = [turn(1, 1), turn(1, 2), Turn("two", "a", 1, (1,) * 400)]
    write(path, *turns)
    log = open_log(path)
    assert log.entries == turns
    assert (log.header["dtype"], log.header["compiled"]) == ("bfloat16", False)
    assert completed_turns(log.entries, QUESTIONS) == {1: turns[:2], "two": turns[2:]}


def test_partial_conversations_and_incomplete_lines_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    write(path, turn(1, 1), turn(1, 2), turn(3, 1), turn("two", 1))
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    log = open_log(path)
    kept = completed_turns(log.entries, QUESTIONS)
    assert set(kept) == {1}
    log.start(kept[1], dtype="bfloat16", compiled=True)
    log.append(turn("two", 1))
    log.close()
    again = open_log(path)
    assert again.header["compiled"]
    assert set(completed_turns(again.entries, QUESTIONS)) == {1, "two"}
    again.remove()
    assert not path.exists()


def test_turns_that_an_edited_file_has_twice_or_in_another_order_are_measured_again() -> None:
    for turns in ([turn(1, 1), turn(1, 1)], [turn(1, 2), turn(1, 1)]):
        assert completed_turns([*turns, turn("two", 1)], QUESTIONS) == {"two": [turn("two", 1)]}


def test_turns_of_different_settings_are_ignored_and_the_settings_named(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    write(path, turn(1, 1), turn(1, 2))
    log = open_log(path, tree=[[0]], seed=1)
    assert log.entries == []
    assert log.header == {}
    assert log.differing == ["tree", "seed"]


@pytest.mark.parametrize("content", ["", "[]\n", "no json\n", "{}\n"])
def test_a_file_that_is_no_log_is_ignored(tmp_path: Path, content: str) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(content)
    log = open_log(path)
    assert (log.entries, log.differing) == ([], [])
