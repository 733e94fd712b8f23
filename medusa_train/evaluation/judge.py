"""Grades answers from 1 to 10 by a judging model, one at a time (MT-Bench's single-answer grading). Knows no decoder.

The wording of the prompts is this project's own, so scores are close to published MT-Bench scores but not the same
measurement; compare runs that one judge graded with these prompts.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from medusa_train.errors import ServerError
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.records import TimedAnswer, TurnRecord
from medusa_train.io import JsonLinesFile, complete_lines
from medusa_train.openai_client import OpenAIClient, RequestRejected

PROMPT_NAME = "medusa-train-single-v1"
NO_SCORE = -1.0
REPLY_TOKENS = 2048

_TASK = (
    "You are an impartial examiner. Grade the assistant's answer to the user's {which} message for helpfulness, "
    "relevance, correctness, depth, creativity and level of detail{reference}. First explain your view in a few "
    "sentences, as objectively as you can. Then give a grade from 1 (worthless) to 10 (excellent) on a line of its "
    'own, strictly in the form "[[grade]]", for example "[[5]]".'
)
_BY_REFERENCE = "; compare it with the reference answer, and point out its mistakes"
_GRADE = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*(?:/\s*10\s*)?\]\]")


@dataclass(frozen=True)
class Judge:
    """A model of a server that grades answers, at temperature 0."""

    server: OpenAIClient
    model: str

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Its reply to a conversation, empty where it said nothing.

        Raises:
            RequestRejected: the server does not take this conversation. ServerError: it takes none, or did not answer.
        """
        body = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": REPLY_TOKENS}
        content = self.server.complete(body)["choices"][0]["message"].get("content")
        return content if isinstance(content, str) else ""


@dataclass(frozen=True)
class Grades:
    """What a judge said of an evaluation.

    Attributes:
        judge: the judging model. lines: all judgements in FastChat's form.
        categories: of every question. failed, reason: how many answers were not judged, and why the last was not.
    """

    judge: str
    lines: list[dict[str, Any]]
    categories: Mapping[int | str, str]
    failed: int = 0
    reason: str = ""

    def summary(self) -> dict[str, Any]:
        """Mean grades: all, per turn, per category; answers without a grade are counted and left out of the means."""
        graded = [line for line in self.lines if line["score"] != NO_SCORE]

        def mean(of: Sequence[Mapping[str, Any]]) -> float | None:
            return fmean(line["score"] for line in of) if of else None

        turns = sorted({line["turn"] for line in graded})
        categories: dict[str, list[Mapping[str, Any]]] = {}
        for line in graded:
            categories.setdefault(self.categories[line["question_id"]], []).append(line)
        return {
            "model": self.judge,
            "prompt": PROMPT_NAME,
            "score": mean(graded),
            "turns": {str(turn): mean([line for line in graded if line["turn"] == turn]) for turn in turns},
            "categories": {name: mean(lines) for name, lines in categories.items()},
            "graded": len(graded),
            "without_grade": len(self.lines) - len(graded),
            "failed": self.failed,
            **({"reason": self.reason} if self.failed else {}),
        }


def grade(
    records: Sequence[TurnRecord],
    questions: Sequence[Question],
    model_id: str,
    judge: Judge,
    path: Path,
    concurrency: int = 4,
    on_done: Callable[[], None] = lambda: None,
) -> Grades:
    """Have every answer graded; judgements are appended to `path` as they come in, and those there are not repeated.

    A judgement is of use again when judge, question, turn and the whole prompt (the answer within it) are the same.
    An answer that the server refuses is counted and left for the next time; where it takes none at all, all that are
    left are.
    """
    prompts = {(r.question_id, r.turn): prompt for r, prompt in zip(records, _prompts(records, questions), strict=True)}
    wanted = {name: json.dumps(prompt) for name, prompt in prompts.items()}
    lines: dict[tuple[int | str, int], dict[str, Any]] = {}
    for line in _read(path):
        name = (line["question_id"], line["turn"])
        if line["judge"] == [judge.model, PROMPT_NAME] and wanted.get(name) == line["user_prompt"]:
            lines[name] = line
    reason = ""
    with JsonLinesFile(path) as file, ThreadPoolExecutor(max(concurrency, 1)) as pool:
        asked = {pool.submit(judge.ask, prompt): name for name, prompt in prompts.items() if name not in lines}
        try:
            for future in as_completed(asked):
                name = asked[future]
                on_done()
                try:
                    reply = future.result()
                except RequestRejected as error:
                    reason = str(error)
                    continue
                except ServerError as error:
                    reason = str(error)
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
                lines[name] = judgement(
                    name[0], model_id, judge.model, PROMPT_NAME, wanted[name], reply, grade_in(reply), name[1]
                )
                file.append(lines[name])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    made = [lines[name] for name in prompts if name in lines]
    categories = {record.question_id: record.category for record in records}
    return Grades(judge.model, made, categories, len(prompts) - len(made), reason)


def grade_in(reply: str) -> float:
    """The grade that a reply gives, the last one if there are several; -1 where there is none from 1 to 10."""
    grades = [float(found) for found in _GRADE.findall(reply)]
    return next((value for value in reversed(grades) if 1 <= value <= 10), NO_SCORE)


def _prompts(records: Sequence[TurnRecord], questions: Sequence[Question]) -> list[list[dict[str, str]]]:
    by_id = {question.question_id: question for question in questions}
    earlier: dict[int | str, list[TurnRecord]] = {}
    made = []
    for record in records:
        before = earlier.setdefault(record.question_id, [])
        made.append(_prompt(by_id[record.question_id], before, record))
        before.append(record)
    return made


def _prompt(question: Question, before: Sequence[TurnRecord], record: TurnRecord) -> list[dict[str, str]]:
    """What the judge is asked about one turn: the conversation up to it, with reference answers where there are any."""
    references = question.reference[: record.turn]
    task = _TASK.format(which="last" if before else "only", reference=_BY_REFERENCE if references else "")
    parts = []
    for number, turn in enumerate([*before, record]):
        parts.append(f"### User, message {number + 1}\n{question.turns[turn.turn - 1]}")
        if number < len(references):
            parts.append(f"### Reference answer {number + 1}\n{references[number]}")
        parts.append(f"### Assistant, answer {number + 1}\n{turn.text}")
    return [{"role": "system", "content": task}, {"role": "user", "content": "\n\n".join(parts)}]


def _read(path: Path) -> list[dict[str, Any]]:
    """The judgements of an earlier time; torn and foreign lines are passed over."""
    try:
        lines = list(complete_lines(path))
    except OSError:
        return []
    found = []
    for _, line in lines:
        try:
            record = json.loads(line)
            record["question_id"], record["turn"], record["judge"], record["user_prompt"], record["score"]
        except (ValueError, KeyError, TypeError):
            continue
        found.append(record)
    return found


def _step_lengths(answer: TimedAnswer) -> list[int]:
    """Tokens of every step: what was accepted and the backbone's own, which a last step may end before."""
    lengths = [accepted + 1 for accepted in answer.accepted]
    if lengths:
        lengths[-1] -= sum(lengths) + 1 - len(answer.tokens)  # the first token is the prefill's
    return lengths


def model_answers(records: Sequence[TurnRecord], model_id: str) -> list[dict[str, Any]]:
    """One `model_answer` line per question: FastChat's keys, and in the choice what Spec-Bench adds to them.

    Spec-Bench's `accept_lengths` counts all tokens that a step gave, the backbone's own included.
    """
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    lines = []
    for question_id, turns in questions.items():
        texts = [turn.text for turn in turns]
        name = hashlib.sha256(json.dumps([model_id, question_id, texts]).encode()).hexdigest()[:22]
        choice = {
            "index": 0,
            "turns": texts,
            "decoding_steps": [turn.answer.steps for turn in turns],
            "new_tokens": [len(turn.answer.tokens) for turn in turns],
            "wall_time": [turn.answer.seconds for turn in turns],
            "accept_lengths": [length for turn in turns for length in _step_lengths(turn.answer)],
        }
        lines.append(
            {
                "question_id": question_id,
                "category": turns[0].category,
                "answer_id": name,
                "model_id": model_id,
                "choices": [choice],
                "tstamp": time.time(),
            }
        )
    return lines


def judgement(
    question_id: int | str,
    model_id: str,
    judge: str,
    prompt_name: str,
    prompt: str,
    reply: str,
    score: float,
    turn: int,
) -> dict[str, Any]:
    """One `model_judgment` line of single-answer grading; a score of -1 says that none was found in the reply."""
    return {
        "question_id": question_id,
        "model": model_id,
        "judge": [judge, prompt_name],
        "user_prompt": prompt,
        "judgment": reply,
        "score": score,
        "turn": turn,
        "tstamp": time.time(),
    }
