"""Grading against a server of our own on the loopback interface."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medusa_train.errors import ServerError
from medusa_train.evaluation.judge import (
    NO_SCORE,
    PROMPT_NAME,
    Judge,
    grade,
    model_answers,
    parse_grade,
)
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.turns import TimedAnswer, Turn
from medusa_train.servers.client import Servers
from tests.evaluation.make_turn import make_turn
from tests.evaluation.test_run_bench import run as evaluate
from tests.fake_server import FakeServer, Reply, completion, error, serving
from tests.servers.test_client import newer_model


def says(text: str) -> Reply:
    return 200, {}, json.dumps(completion({}, text=text)).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with serving(lambda number, body: says("Fine. [[7]]")) as fake:
        yield fake


def judge(server: FakeServer) -> Judge:
    servers = Servers(
        [server.url],
        key_variable="OPENAI_API_KEY",
        timeout=5.0,
        retry_seconds=0.5,
        concurrency=1,
    )
    return Judge(servers, "judge-1")


QUESTIONS = [
    Question(81, "writing", ("Write a poem.", "Now shorter."), ""),
    Question(111, "math", ("2 + 2?",), "", ("It is 4.",)),
]


def records(text: str = "Roses.") -> list[Turn]:
    answer = TimedAnswer((1,), 1.0)
    return [
        make_turn(81, "writing", 1, (1,), answer, answer, answer, text, history=text),
        make_turn(81, "writing", 2, (1,), answer, answer, answer, "Rose."),
        make_turn(111, "math", 1, (1,), answer, answer, answer, "4"),
    ]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Good. [[8]]", 8.0),
        ("[[3]] at first, but then [[6.5]]", 6.5),
        ("Rating: [[9/10]]", 9.0),
        ("It deserves 8.", NO_SCORE),
        ("[[0]] or [[11]]", NO_SCORE),
        ("", NO_SCORE),
        ("<think>[[3]] would be harsh</think>Rating: 8", NO_SCORE),
    ],
)
def test_the_grade_is_the_last_one_in_double_brackets(reply: str, score: float) -> None:
    assert parse_grade(reply) == score


@pytest.mark.parametrize(
    "reply",
    [
        "[[7]] / [[10]]",
        "[[7]]/[[10]]",
        "**[[7]]** / **[[10]]**",
        "Rating: [[7]] / 10",
        "[[7 / 10]]",
        "[[7 out of 10]]",
        "[[7]] out of [[10]]",
        "[[7]] (of [[10]])",
        "On a scale from [[1]] to [[10]]: [[7]]",
        "[[7]] on a scale of [[1]]-[[10]]",
        "Rating: [7] / [10]",
        "[[7]] out of a possible [[10]]",
        "[[7]] von [[10]]",
        "[[7]], where [[1]] is worthless and [[10]] is excellent",
        "[[7]]. A [[10]] would be perfect.",
    ],
)
def test_the_scale_is_no_grade(reply: str) -> None:
    assert parse_grade(reply) == 7


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("[[10]] / [[10]]", 10.0),
        ("[[Rating: 6]]", 6.0),
        (r"\[\[7\]\]", 7.0),
        ("[[8.]]", 8.0),
        ("[7]", 7.0),
        ("Rating: [8.5]", 8.5),
        ("Rating: **[8]**", 8.0),
        ("[Score: 6]", 6.0),
        ("[[7]", 7.0),
        ("As [1] and [2] say, it is right. Rating: [8]", 8.0),
        ("[[8]], as [1] says", 8.0),
    ],
)
def test_grades_of_other_forms(reply: str, score: float) -> None:
    """FastChat's second pattern reads single brackets, too."""
    assert parse_grade(reply) == score


@pytest.mark.parametrize(
    "reply",
    [
        "As [1] says. [8]",
        "As [1] and [2] say.",
        "The loop ends at `a[3]`.",
        "[[7, 8]]",
        "[[grade]]",
        "[[85]]",
        "Rating: [11]",
        "[0]",
        "Rating: 8/10",
    ],
)
def test_what_may_be_another_number_is_no_grade(reply: str) -> None:
    assert parse_grade(reply) == NO_SCORE


def test_judgements_are_kept_in_fastchats_form_and_averaged(
    server: FakeServer, tmp_path: Path
) -> None:
    replies = {"Rose.": "[[4]]", "4": "Right. [[10]]"}
    server.script = lambda number, body: says(
        replies.get(body["messages"][1]["content"].split("\n")[-1], "[[7]]")
    )
    path = tmp_path / "model_judgment" / "judge-1_single.jsonl"
    summary = grade(records(), QUESTIONS, "mine", judge(server), path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    keys = {"question_id", "model", "judge", "user_prompt", "judgment", "score", "turn", "tstamp"}
    assert all(set(line) == keys for line in lines)
    assert {(line["question_id"], line["turn"]): line["score"] for line in lines} == {
        (81, 1): 7.0,
        (81, 2): 4.0,
        (111, 1): 10.0,
    }
    assert lines[0]["judge"] == ["judge-1", PROMPT_NAME]
    assert summary["score"] == 7.0
    assert summary["turns"] == {"1": 8.5, "2": 4.0}
    assert summary["categories"] == {"writing": 5.5, "math": 10.0}
    assert (summary["graded"], summary["failed"], summary["without_grade"]) == (3, 0, 0)


def test_the_judge_sees_earlier_turns_and_reference_answers(
    server: FakeServer, tmp_path: Path
) -> None:
    asked = records("<think>\nFlowers rhyme.\n</think>\n\nRoses.")
    asked[0].text = "Tulips."  # the second turn was asked after the plain answer
    grade(asked, QUESTIONS, "mine", judge(server), tmp_path / "j.jsonl")
    first, second, third = (body["messages"][1]["content"] for body in server.bodies)
    assert "Now shorter." not in first
    assert "Tulips." in first
    assert "Flowers rhyme." not in first + second
    assert "Tulips." not in second
    assert (
        second.index("Write a poem.")
        < second.index("Roses.")
        < second.index("Now shorter.")
        < second.index("Rose.")
    )
    assert "It is 4." in third
    assert "reference answer" in server.bodies[2]["messages"][0]["content"]
    assert "reference answer" not in server.bodies[0]["messages"][0]["content"]
    assert {body["temperature"] for body in server.bodies} == {0}


def test_judgements_are_reused_unless_the_answer_changed(
    server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "j.jsonl"
    grade(records(), QUESTIONS, "mine", judge(server), path)
    path.write_text(path.read_text(encoding="utf-8") + '{"torn', encoding="utf-8")
    assert grade(records(), QUESTIONS, "mine", judge(server), path)["graded"] == 3
    assert len(server.bodies) == 3
    grade(records("Violets."), QUESTIONS, "mine", judge(server), path)
    # the first answer changed, and it is part of the second turn's conversation
    assert len(server.bodies) == 5


def test_answers_whose_judge_fails_are_counted_and_left_for_the_next_time(
    server: FakeServer, tmp_path: Path
) -> None:
    server.script = lambda number, body: error(400, "no") if "2 + 2" in str(body) else says("[[6]]")
    path = tmp_path / "j.jsonl"
    summary = grade(records(), QUESTIONS, "mine", judge(server), path)
    assert summary["failed"] == 1
    assert "400" in summary["reason"]

    ended = threading.Event()

    def refuse(number: int, body: Any) -> Reply:
        if number > 3:
            ended.wait(30)  # the first refusal has cancelled the last request
        return error(401, "who are you?")

    server.script = refuse
    assert (
        grade(records(), QUESTIONS, "mine", judge(server), tmp_path / "other.jsonl")["failed"] == 3
    )
    ended.set()
    assert len(server.bodies) <= 3 + 2  # one refusal of everything is enough
    server.script = lambda number, body: says("no grade at all")
    summary = grade(records(), QUESTIONS, "mine", judge(server), path)
    assert (summary["graded"], summary["without_grade"], summary["failed"]) == (2, 1, 0)


def test_an_evaluation_is_graded_where_a_judge_is_named(
    server: FakeServer, run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    keys = {"dtype": "float32", "exactness": False, "prompt_lookup": False}
    report, shown = evaluate(
        bench_file, run_dir, tmp_path, judge_base_url=server.url, judge_model="small/judge", **keys
    )
    assert report["judge"]["score"] == 7.0
    assert report["judge"]["graded"] == 4
    assert "Quality: 7.00 of 10 by small/judge (4 answers)." in shown
    assert (
        len((tmp_path / "model_judgment" / "small_judge_single.jsonl").read_text().splitlines())
        == 4
    )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (error(400, "no such model"), "no such model"),
        (error(401, "who are you?"), "requires an API key"),
        (error(404, "not here"), "check the URL"),
        ((200, {}, b'{"choices": [{"message": {"content": null}}]}'), "its reply has no text"),
    ],
)
def test_a_judge_that_refuses_ends_an_evaluation_before_anything_is_decoded(
    server: FakeServer, run_dir: Path, bench_file: Path, tmp_path: Path, reply: Reply, message: str
) -> None:
    server.script = lambda number, body: reply
    keys = {"judge_base_url": server.url, "judge_model": "j", "dtype": "float32"}
    with pytest.raises(ServerError, match=rf"(?s)judge j: .*{message}"):
        evaluate(bench_file, run_dir, tmp_path, **keys)
    assert not list(tmp_path.rglob("turns.jsonl"))
    assert len(server.bodies) == 1


def test_a_judge_gets_the_key_that_is_named_and_no_other(
    server: FakeServer,
    run_dir: Path,
    bench_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-this-judge")
    monkeypatch.setenv("JUDGE_KEY", "key-of-the-judge")
    server.script = lambda number, body: error(404, "not here")
    keys = {"judge_base_url": server.url, "judge_model": "j", "api_key_env": "JUDGE_KEY"}
    with pytest.raises(ServerError):
        evaluate(bench_file, run_dir, tmp_path, **keys)
    assert server.authorization == ["Bearer key-of-the-judge"]


def test_a_judge_that_takes_no_temperature_is_asked_without_before_anything_is_decoded(
    server: FakeServer, run_dir: Path, bench_file: Path, tmp_path: Path
) -> None:
    decoded: list[bool] = []  # whether there were answers yet, at each request

    def script(number: int, body: dict[str, Any]) -> Reply:
        decoded.append((tmp_path / "turns.jsonl").exists())
        return newer_model(number, body) or says("[[7]]")

    server.script = script
    keys = {"dtype": "float32", "exactness": False, "prompt_lookup": False}
    report, shown = evaluate(
        bench_file, run_dir, tmp_path, judge_base_url=server.url, judge_model="j", **keys
    )
    assert report["judge"]["graded"] == 4
    assert decoded == 3 * [False] + 4 * [True]  # two rejections and an answer; the grades
    text = " ".join(shown.split())
    assert text.count("rejects temperature") == text.count("rejects max_tokens") == 1


def test_a_question_is_one_line_with_all_its_turns() -> None:
    answer = TimedAnswer((1, 2, 3, 4), 0.5, 0.1, 2, (1, 0))
    # an eos among the drafted tokens ends a step before the target model's own one
    cut = TimedAnswer((1, 2, 3, 4), 0.5, 0.1, 2, (0, 2))
    made = [
        make_turn(81, "writing", turn, (1,), one, cut, cut, str(turn))
        for turn, one in ((1, answer), (2, cut))
    ]
    first, second = model_answers(
        [*made, make_turn("x", "math", 1, (1,), None, answer, answer, "Three.")], "mine"
    )
    assert set(first) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert (first["question_id"], first["model_id"]) == (81, "mine")
    (choice,) = first["choices"]
    assert (choice["index"], choice["turns"]) == (0, ["1", "2"])
    assert (choice["new_tokens"], choice["decoding_steps"], choice["wall_time"]) == (
        [4, 4],
        [2, 2],
        [0.5, 0.5],
    )
    assert choice["accept_lengths"] == [2, 1, 1, 2]
    assert second["choices"][0]["turns"] == ["Three."]
    assert first["answer_id"] == model_answers(made, "mine")[0]["answer_id"] != second["answer_id"]
