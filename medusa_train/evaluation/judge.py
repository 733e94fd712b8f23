"""Grade answers from 1 to 10 with a judge model (MT-Bench, single-answer grading), and write FastChat's file formats.

The prompts are worded differently from FastChat's, so scores are close to published MT-Bench scores but not the same
measurement: compare only runs that one judge graded with these prompts.
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

from medusa_train.data.conversation import without_reasoning
from medusa_train.errors import ServerError
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.records import TimedAnswer, TurnRecord
from medusa_train.io import JsonLinesFile, complete_lines
from medusa_train.servers.client import OpenAIClient
from medusa_train.servers.server import RequestRejected

PROMPT_NAME = "medusa-train-single-v1"
NO_SCORE = -1.0
REPLY_TOKENS = 2048

Key = tuple[int | str, int]
"""Question id and turn."""

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
    """A judge model on an OpenAI-compatible server, called at temperature 0."""

    server: OpenAIClient
    model: str

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the reply to a conversation; empty if the server returns no text.

        Raises:
            RequestRejected: the server rejects this conversation.
            ServerError: the server rejects every request, or does not answer.
        """
        body = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": REPLY_TOKENS}
        content = self.server.complete(body)["choices"][0]["message"].get("content")
        return content if isinstance(content, str) else ""


@dataclass(frozen=True)
class Grades:
    """The judgements of an evaluation.

    Attributes:
        judge: name of the judge model.
        lines: all judgements in FastChat's format.
        categories: category of each question.
        failed: number of answers that were not judged.
        reason: why the last of those was not judged.
    """

    judge: str
    lines: list[dict[str, Any]]
    categories: Mapping[int | str, str]
    failed: int = 0
    reason: str = ""

    def summary(self) -> dict[str, Any]:
        """Return mean grades overall, per turn and per category; answers without a grade are counted separately."""
        graded = [line for line in self.lines if line["score"] != NO_SCORE]

        def mean(lines: Sequence[Mapping[str, Any]]) -> float | None:
            return fmean(line["score"] for line in lines) if lines else None

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
    """Grade every answer; judgements are appended to `path` as they arrive, and those already there are reused.

    A judgement is reused if judge, question, turn and the whole prompt, which contains the answer, are the same. An
    answer whose request the server rejects counts as failed; after any other server error all remaining ones do. Failed
    answers are graded when the evaluation is run again.

    Args:
        records: the answers.
        questions: their questions.
        model_id: name of the judged model, for the judgements.
        judge: the judge model.
        path: JSON Lines file of judgements.
        concurrency: number of requests at a time.
        on_done: called after each request.
    """
    prompts = {(r.question_id, r.turn): prompt for r, prompt in zip(records, _prompts(records, questions), strict=True)}
    texts = {key: json.dumps(prompt) for key, prompt in prompts.items()}
    lines: dict[Key, dict[str, Any]] = {}
    for line in _read(path):
        key = (line["question_id"], line["turn"])
        if line["judge"] == [judge.model, PROMPT_NAME] and texts.get(key) == line["user_prompt"]:
            lines[key] = line
    missing = {key: prompt for key, prompt in prompts.items() if key not in lines}
    with JsonLinesFile(path) as file:

        def append(key: Key, reply: str) -> None:
            lines[key] = judgement(
                key[0], model_id, judge.model, PROMPT_NAME, texts[key], reply, parse_grade(reply), key[1]
            )
            file.append(lines[key])

        reason = _ask_all(judge, missing, concurrency, append, on_done)
    judged = [lines[key] for key in prompts if key in lines]
    categories = {record.question_id: record.category for record in records}
    return Grades(judge.model, judged, categories, len(prompts) - len(judged), reason)


def _ask_all(
    judge: Judge,
    prompts: Mapping[Key, list[dict[str, str]]],
    concurrency: int,
    on_reply: Callable[[Key, str], None],
    on_done: Callable[[], None],
) -> str:
    """Send all prompts; return why the last failing request failed, or "". Stops at an error other than a rejection."""
    reason = ""
    with ThreadPoolExecutor(max(concurrency, 1)) as pool:
        requests = {pool.submit(judge.ask, prompt): key for key, prompt in prompts.items()}
        try:
            for future in as_completed(requests):
                on_done()
                try:
                    reply = future.result()
                except RequestRejected as error:
                    reason = str(error)
                except ServerError as error:
                    reason = str(error)
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
                else:
                    on_reply(requests[future], reply)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return reason


def parse_grade(reply: str) -> float:
    """Return the last grade from 1 to 10 in a reply; -1 if there is none."""
    grades = [float(match) for match in _GRADE.findall(reply)]
    return next((value for value in reversed(grades) if 1 <= value <= 10), NO_SCORE)


def _prompts(records: Sequence[TurnRecord], questions: Sequence[Question]) -> list[list[dict[str, str]]]:
    by_id = {question.question_id: question for question in questions}
    earlier: dict[int | str, list[TurnRecord]] = {}
    prompts = []
    for record in records:
        before = earlier.setdefault(record.question_id, [])
        prompts.append(_prompt(by_id[record.question_id], before, record))
        before.append(record)
    return prompts


def _prompt(question: Question, before: Sequence[TurnRecord], record: TurnRecord) -> list[dict[str, str]]:
    """Build the judge's prompt for one turn: the conversation up to it, with reference answers where there are any."""
    references = question.reference[: record.turn]
    task = _TASK.format(which="last" if before else "only", reference=_BY_REFERENCE if references else "")
    parts = []
    for number, turn in enumerate([*before, record]):
        parts.append(f"### User, message {number + 1}\n{question.turns[turn.turn - 1]}")
        if number < len(references):
            parts.append(f"### Reference answer {number + 1}\n{references[number]}")
        parts.append(f"### Assistant, answer {number + 1}\n{without_reasoning(turn.text)}")
    return [{"role": "system", "content": task}, {"role": "user", "content": "\n\n".join(parts)}]


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the judgements of an earlier run; incomplete and unrelated lines are skipped."""
    try:
        lines = list(complete_lines(path))
    except OSError:
        return []
    judgements = []
    for _, line in lines:
        try:
            record = json.loads(line)
            record["question_id"], record["turn"], record["judge"], record["user_prompt"], record["score"]
        except (ValueError, KeyError, TypeError):
            continue
        judgements.append(record)
    return judgements


def _step_lengths(answer: TimedAnswer) -> list[int]:
    """Count the tokens of each step: the accepted ones and one of the backbone, which the last step may lack."""
    lengths = [accepted + 1 for accepted in answer.accepted]
    if lengths:
        lengths[-1] -= sum(lengths) + 1 - len(answer.tokens)  # the first token comes from the prefill
    return lengths


def model_answers(records: Sequence[TurnRecord], model_id: str) -> list[dict[str, Any]]:
    """Build one `model_answer` line per question, with FastChat's keys and the ones that Spec-Bench adds.

    Spec-Bench's `accept_lengths` counts all tokens of a step, including the one of the backbone.
    """
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    lines = []
    for question_id, turns in questions.items():
        texts = [turn.text for turn in turns]
        answer_id = hashlib.sha256(json.dumps([model_id, question_id, texts]).encode()).hexdigest()[:22]
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
                "answer_id": answer_id,
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
    """Build one `model_judgment` line in FastChat's format; a score of -1 means that the reply has no grade."""
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
