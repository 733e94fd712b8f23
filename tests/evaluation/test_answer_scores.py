import sys
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from medusa_train.errors import ConfigError
from medusa_train.evaluation import answer_scores
from medusa_train.evaluation.answer_scores import (
    answered_turns,
    build_program,
    code_samples,
    extract_number,
    rouge_means,
    rouge_scorer,
    score_answers,
    summarize_scores,
    wilson_interval,
)
from medusa_train.evaluation.code_sandbox import ProgramResult
from medusa_train.evaluation.questions import FunctionTest, Question
from medusa_train.evaluation.turns import Score, TimedAnswer, Turn
from tests.evaluation.make_turn import make_turn


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 42.", "42"),
        ("####42 apples for 3 people", "42"),
        ("#### $1,234.50 in all", "1234.50"),
        ("#### 1200%", "1200"),
        ("#### -7", "-7"),
        ("#### -$7", "-7"),
        ("####\u22127", "-7"),
        ("#### 41. No:\n#### 43\nThat took 2 steps.", "43"),
        ("#### 5\n#### Step 3", "5"),
        ("####\n**6**", "6"),
        ("9 * 2 = 18.\n#### 18, which is 2 for each of 9", "18"),
        ("#### 42. That took 3 steps.", "42"),
        (r"#### 1. Add" "\n#### 2. Result\nIt is \\boxed{42}.", "42"),
        ("I will end with ####. So 8 + 1 = 9", "9"),
        (r"So it is \boxed{18}, out of 20.", "18"),
        (r"\boxed{\$1{,}800} in 12 months", "1800"),
        (r"\boxed{\text{18 dollars}} 5", "18"),
        (r"\boxed{x} then 5", "5"),
        ("First 3, then 4: the answer is **18.00**.", "18"),
        ("The rest is 10-5", "5"),
        ("1,2,3", "3"),
        ("It costs 1,000,000 dollars", "1000000"),
        ("half is .5", "0.5"),
        ("2x", "2"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_result_of_an_answer(text: str, number: str | None) -> None:
    assert extract_number(text) == (None if number is None else Decimal(number))


PROMPT = (
    'from math import sqrt\n\ndef helper(x):\n    return x\n\ndef root(x):\n    """Return the'
    ' root."""\n'
)
TEST = FunctionTest(PROMPT, "root", "def check(candidate):\n    assert candidate(9) == 3\n")
WHOLE = "def root(x):\n    return helper(sqrt(x))\n"


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        (
            f"Here it is:\n```python\n{WHOLE}```\nIt calls sqrt. For"
            " example:\n```python\nroot(x='a')\n```"
        ),
        f"Install it first:\n```python\nimport nothing\n```\nThen:\n```python\n{WHOLE}```",
        f"```\n{WHOLE}\n```",
        f"```python\n{WHOLE}",  # cut off by max_new_tokens
        f"Sure. Here it is:\n\nimport math\n\n{WHOLE}\nThis function returns the root.",
        "    return helper(sqrt(x))",
        "    return helper(sqrt(x))\n\n\nprint(root('a'))\nI hope this helps.",
        "```python\n    return helper(sqrt(x))\n```",
        "1. So:\n   ```python\n   def root(x):\n       return sqrt(x)\n   ```",
        f"```python\nfrom __future__ import annotations\n{WHOLE}```",
        f"```python\n{WHOLE}\nif __name__ == '__main__':\n    raise SystemExit\n```",
    ],
)
def test_the_function_of_an_answer_passes_its_test(answer: str) -> None:
    exec(build_program(TEST, answer), {})


@pytest.mark.parametrize(
    "answer", ["    return x", "I cannot do that.", "```python\ndef root(x):\n    return 4\n```"]
)
def test_a_wrong_function_does_not_pass(answer: str) -> None:
    with pytest.raises((AssertionError, SyntaxError)):
        exec(build_program(TEST, answer), {"__name__": "__main__"})


class Words:
    """A tokenizer whose token n is the n-th word."""

    def __init__(self, *words: str) -> None:
        self.words = words

    added_tokens_decoder, all_special_ids, all_special_tokens = (
        dict[int, Any](),
        list[int](),
        list[str](),
    )

    def decode(self, token_ids: list[int], **options: bool) -> Any:
        return " ".join(self.words[token] for token in token_ids)


def turn(question: int | str, tree: tuple[int, ...] | None, plain: tuple[int, ...]) -> Turn:
    timed = None if tree is None else TimedAnswer(tree, 1.0)
    return make_turn(
        question, "gsm8k", 1, (1,), timed, TimedAnswer(plain, 1.0), TimedAnswer(plain, 1.0)
    )


QUESTIONS = [
    Question(1, "gsm8k", ("?",), "f:1", expected=Decimal(4)),
    Question(2, "gsm8k", ("?",), "f:2", expected=Decimal(5)),
    Question(3, "chat", ("?",), "f:3"),
]


def test_both_decoders_are_scored_where_the_question_has_an_answer() -> None:
    records = [turn(1, (0, 1), (0, 1)), turn(2, (0, 1), (0, 2)), turn(3, (0,), (0,))]
    scored: list[None] = []
    answered = answered_turns(records, QUESTIONS, Words("####", "4", "5"))
    score_answers(answered, lambda: scored.append(None))
    assert records[0].scores == dict.fromkeys(("tree", "plain"), Score("exact match", True, "4"))
    assert records[1].scores["tree"] == Score("exact match", False, "4")
    assert records[1].scores["plain"] == Score("exact match", True, "5")
    assert records[2].scores == {}
    assert len(scored) == 2
    summary = summarize_scores(records)
    assert summary is not None
    assert (summary["metric"], summary["answers"], summary["differing"]) == ("exact match", 2, 1)
    assert (summary["tree"]["correct"], summary["tree"]["rate"]) == (1, 0.5)
    assert summary["plain"]["interval"] is None  # of two answers
    five = summarize_scores([records[0]] * 5)
    assert five is not None
    assert five["plain"]["interval"] == wilson_interval(5, 5)


@pytest.mark.parametrize(
    ("opened", "text", "correct"),
    [
        ("", "<think>\n#### 5\n</think>\n\n#### 4", True),
        ("<think>\n", "#### 5\n</think>\n\n4", True),  # the prompt opens the reasoning
        ("", "<think>\n#### 4\n</think>\n\nIt is 5.", False),
        ("", "<think>\n#### 4", False),  # cut off
        ("<think>\n", "#### 4", False),
    ],
)
def test_reasoning_is_not_scored(opened: str, text: str, correct: bool) -> None:
    records = [replace(turn(1, None, (0,)), opened=opened)]
    score_answers(answered_turns(records, QUESTIONS, Words(text)), print)
    assert records[0].scores["plain"].correct is correct
    summary = summarize_scores(records)
    assert summary is not None
    assert not {"tree", "differing"} & set(summary)


def test_rouge_is_that_of_counts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rouge_score")
    one, none = ("The cats sat on the mat.",), ("",)
    questions = [
        Question(1, "summarization", ("?",), "f:1", one),
        Question(2, "gsm8k", ("?",), "f:2", none),
    ]
    records = [turn(1, (0, 1, 2), (0, 2)), turn(2, (0,), (0,))]
    answered = answered_turns(records, questions, Words("the ", "cat ", "sat "))
    means = rouge_means(answered, rouge_scorer(questions))
    assert means is not None
    assert means["answers"] == 1
    # 3 of 3 and of 6 words, 2 of 2 and of 5 pairs, and 3 words in order; plainly 2 of 2 and of 6, 0
    # of 1, and 2
    assert means["tree"] == pytest.approx({"rouge1": 200 / 3, "rouge2": 400 / 7, "rougeL": 200 / 3})
    assert means["plain"] == pytest.approx({"rouge1": 50, "rouge2": 0, "rougeL": 50})
    with pytest.raises(ConfigError, match="no question of this benchmark has a `reference`"):
        rouge_scorer(QUESTIONS)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ConfigError, match="pip install rouge-score"):
        rouge_scorer(questions)


def test_equal_answers_run_once_and_keep_their_indentation(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []

    def run_program(program: str) -> ProgramResult:
        programs.append(program)
        return ProgramResult("failed", "AssertionError")

    monkeypatch.setattr(answer_scores, "run_program", run_program)
    monkeypatch.setattr(answer_scores, "sandbox_unsupported_reason", lambda: None)
    records = [turn(1, (0,), (0,))]
    question = Question(1, "humaneval", ("?",), "f:1", expected=TEST)
    score_answers(answered_turns(records, [question], Words("    return 3")), print)
    assert len(programs) == 1
    assert f"{PROMPT}    return 3\n" in programs[0]
    assert records[0].scores["plain"] == Score("pass@1", False, "failed: AssertionError")


def test_without_a_sandbox_no_code_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_scores, "sandbox_unsupported_reason", lambda: "no bubblewrap")
    records = [turn(1, (0,), (1,))]
    questions = [Question(1, "humaneval", ("?",), "f:1", expected=TEST)]
    score_answers(answered_turns(records, questions, Words("a", "b")), print)
    assert records[0].scores == {}


def test_samples_have_the_programs_of_the_answers() -> None:
    records = [turn("a/0", (0,), (1,))]
    questions = [Question("a/0", "humaneval", ("?",), "f:1", expected=TEST)]
    tokenizer = Words("    return 3", "    return 4")
    samples = code_samples(answered_turns(records, questions, tokenizer))
    for name, line in (("tree", "    return 3"), ("plain", "    return 4")):
        (sample,) = samples[name]
        assert sample["task_id"] == "a/0"
        assert sample["completion"] == sample["solution"] == f"{PROMPT}{line}"


def test_an_interruption_leaves_both_scores_of_a_turn_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = iter([ProgramResult("passed", "")])
    monkeypatch.setattr(answer_scores, "run_program", lambda program: next(outcomes))
    monkeypatch.setattr(answer_scores, "sandbox_unsupported_reason", lambda: None)
    records = [turn(1, (0,), (1,))]
    question = Question(1, "humaneval", ("?",), "f:1", expected=TEST)
    answered = answered_turns(records, [question], Words("a", "b"))
    with pytest.raises(StopIteration):
        score_answers(answered, print)
    assert records[0].scores == {}


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),  # published examples of the score interval
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_intervals(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)
