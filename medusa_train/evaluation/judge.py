"""Grade answers from 1 to 10 with a judge model (MT-Bench, single-answer grading), and write
FastChat's file formats.

The prompts are worded differently from FastChat's. Scores are close to published MT-Bench scores,
but they are not the same measurement: compare only runs that the same judge graded with these
prompts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from medusa_train.data.conversation import without_reasoning
from medusa_train.errors import ServerError
from medusa_train.evaluation.questions import Question
from medusa_train.evaluation.turns import TimedAnswer, Turn
from medusa_train.json_lines import JsonLinesFile, read_records
from medusa_train.servers.responses import RequestRejected

if TYPE_CHECKING:
    from medusa_train.servers.client import Servers

PROMPT_NAME = "medusa-train-single-v1"
NO_SCORE = -1.0
REPLY_TOKENS = 2048

Key = tuple[int | str, int]
"""Question id and turn."""

_TASK = (
    "You are an impartial examiner. Grade the assistant's answer to the user's {which} message"
    " for helpfulness, relevance, correctness, depth, creativity and level of detail{reference}."
    " First explain your view in a few sentences, as objectively as you can. Then give a grade from"
    ' 1 (worthless) to 10 (excellent) on a line of its own, strictly in the form "[[grade]]", for'
    ' example "[[5]]".'
)
_BY_REFERENCE = "; compare it with the reference answer, and point out its mistakes"
_NUMBER = r"(\d+(?:\.\d*)?)"
_OF_TEN = r"(?:/|\b(?:out )?of(?: an?)?(?: possible| maximum)?\b)"
#: Mentions of the grading scale, which are not grades: "/ [[10]]" in "[[7]] / [[10]]",
#: "[[1]] to [[10]]" in "from [[1]] to [[10]]", "von [[10]]" in "[[7]] von [[10]]", and
#: "[[10]] would" in "[[10]] would be perfect".
_SCALE = re.compile(
    rf"{_OF_TEN}[\s*]*(?:\[+\s*10\s*\]+|10\b)|\[+1\]+\s*(?:to|and|-|–)\s*\[+10\]+"
    r"|(?<=\]\])[ *(]*(?:[^\W\d]+[ *]+)?\[\[10\]\]"
    r"|\[\[\s*(?:1|10)\s*\]\][ *]*(?:=|(?:is|are|being|means?|would)\b)",
    re.I,
)
_LABEL = r"(?:\b(?:rating|grade|score)\b[\s*:=]*(?:is\b\s*)?)"
_GRADE = re.compile(rf"\[\[\s*{_LABEL}?{_NUMBER}\s*\]\]", re.I)
#: A grade in single brackets. FastChat reads these if there are no double brackets. But [1] may
#: also be a footnote.
_LABELLED = re.compile(rf"{_LABEL}\[\s*{_NUMBER}\s*\]", re.I)
_SINGLE = re.compile(rf"(?<!\w)\[\s*{_LABEL}?{_NUMBER}\s*\]", re.I)


@dataclass(frozen=True)
class Judge:
    """A judge model on an OpenAI-compatible server.

    It is called at temperature 0, or at its default temperature if it rejects this parameter (see
    `optional` of `Servers`).
    """

    servers: Servers
    model: str

    def check(self) -> None:
        """Ask for a reply to a greeting; raises ServerError if there is none."""

        async def greet() -> str:
            async with self.servers:
                return await self.ask([{"role": "user", "content": "Hello"}])

        try:
            reply = asyncio.run(greet())
        except (RequestRejected, ServerError) as error:
            raise ServerError(f"judge {self.model}: {error}") from None
        if not reply.strip():
            raise ServerError(
                f"judge {self.model}: its reply has no text; if it all came as reasoning"
                " (`reasoning_content`), start the server without its reasoning parser"
            )

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the reply to a conversation; empty if the server returns no text.

        Raises the same errors as `Servers.complete`.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": REPLY_TOKENS,
        }
        completion = await self.servers.complete(body)
        return completion["choices"][0]["message"].get("content") or ""


def grade(
    records: Sequence[Turn],
    questions: Sequence[Question],
    model_id: str,
    judge: Judge,
    path: Path,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Grade every answer. Judgments are appended to `path` as they arrive, and judgments that are
    already in `path` are reused.

    A judgment is reused if judge, question, turn and the whole prompt, which contains the answer,
    are the same. An answer whose request the server rejects counts as failed. After any other
    server error all remaining answers count as failed. Failed answers are graded when the
    evaluation is run again.

    Returns:
        Mean grades overall, per turn and per category. Also the number of answers with a grade
        (`graded`), of answers whose reply contains no grade (`without_grade`), and of answers
        without a reply (`failed`), with the `reason` of the last failure.
    """
    prompts = _prompts(records, questions)
    judgements: dict[Key, dict[str, Any]] = {}
    reason = ""

    async def ask(key: Key) -> None:
        nonlocal reason
        try:
            reply = await judge.ask(prompts[key])
        except RequestRejected as rejected:
            reason = str(rejected)
        else:
            judgements[key] = {
                "question_id": key[0],
                "model": model_id,
                "judge": [judge.model, PROMPT_NAME],
                "user_prompt": json.dumps(prompts[key]),
                "judgment": reply,
                "score": parse_grade(reply),
                "turn": key[1],
                "tstamp": time.time(),
            }
            file.append(judgements[key])
        on_done()

    async def ask_all(keys: Sequence[Key]) -> None:
        async with judge.servers:
            await judge.servers.for_each(ask, keys)

    with JsonLinesFile(path) as file:
        # 1. judgments that are already in the file
        for line in read_records(path):
            match line:
                case {
                    "question_id": name,
                    "turn": turn,
                    "judge": by,
                    "user_prompt": asked,
                    "score": _,
                }:
                    prompt = json.dumps(prompts.get((name, turn)))
                    if by == [judge.model, PROMPT_NAME] and asked == prompt:
                        judgements[name, turn] = line
        # 2. ask for the remaining judgments
        try:
            asyncio.run(ask_all([key for key in prompts if key not in judgements]))
        except ServerError as error:
            reason = str(error)

    # 3. compute means, and count failed answers
    categories = {record.question_id: record.category for record in records}
    judged = [judgements[key] for key in prompts if key in judgements]
    graded = [line for line in judged if line["score"] != NO_SCORE]
    graded.sort(key=lambda line: line["turn"])

    def means(groups: Iterable[str]) -> dict[str, float]:
        """Return the mean grade of each group; `groups` has the group of each graded answer."""
        scores: dict[str, list[float]] = {}
        for name, line in zip(groups, graded, strict=True):
            scores.setdefault(name, []).append(line["score"])
        return {name: fmean(grades) for name, grades in scores.items()}

    result = {
        "model": judge.model,
        "prompt": PROMPT_NAME,
        "score": fmean(line["score"] for line in graded) if graded else None,
        "turns": means(str(line["turn"]) for line in graded),
        "categories": means(categories[line["question_id"]] for line in graded),
        "graded": len(graded),
        "without_grade": len(judged) - len(graded),
        "failed": len(prompts) - len(judged),
    }
    if result["failed"]:
        result["reason"] = reason
    return result


def parse_grade(reply: str) -> float:
    """Return the last grade from 1 to 10 in a reply; -1 if there is none.

    A grade is a number in double brackets. If there are no double brackets, it is a number in
    single brackets that is called the rating, grade or score, or that is the only number in
    brackets.
    """
    text = _SCALE.sub("", re.sub(r"\\([\[\]])", r"\1", without_reasoning(reply)))
    grades = _GRADE.findall(text) or _LABELLED.findall(text) or _SINGLE.findall(text)
    valid_grades = [float(grade) for grade in grades if 1 <= float(grade) <= 10]
    is_called_grade = _GRADE.search(text) or _LABELLED.search(text)
    if valid_grades and (is_called_grade or len(set(grades)) == 1):
        return valid_grades[-1]
    return NO_SCORE


def _prompts(
    records: Sequence[Turn], questions: Sequence[Question]
) -> dict[Key, list[dict[str, str]]]:
    """Build the judge's prompt for every turn."""
    questions_by_id = {question.question_id: question for question in questions}
    turns_by_question: dict[int | str, list[Turn]] = {}
    prompts = {}
    for record in records:
        turns = turns_by_question.setdefault(record.question_id, [])
        turns.append(record)
        prompts[record.question_id, record.turn] = _prompt(
            questions_by_id[record.question_id], turns
        )
    return prompts


def _prompt(question: Question, turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Build the judge's prompt for the last of `turns`: the conversation up to it, with the
    available reference answers.

    Earlier answers are the plain ones, because the model has seen these.
    """
    # 1. the task
    graded = turns[-1]
    references = question.reference[: graded.turn]
    which = "last" if len(turns) > 1 else "only"
    by_reference = _BY_REFERENCE if any(references) else ""
    task = _TASK.format(which=which, reference=by_reference)

    # 2. the conversation
    parts = []
    for number, record in enumerate(turns, start=1):
        *before, asked = question.asked(record.turn)
        for message in before:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.calls]
            text = "\n".join([message.content, *calls])
            parts.append(f"### {message.role.capitalize()} message\n{text}")
        parts.append(f"### {asked.role.capitalize()}, message {number}\n{asked.content}")
        if number <= len(references) and references[number - 1]:
            parts.append(f"### Reference answer {number}\n{references[number - 1]}")
        answer = record.text
        if record is not graded:
            answer = record.opened + record.history
        parts.append(f"### Assistant, answer {number}\n{without_reasoning(answer)}")
    conversation = "\n\n".join(parts)
    return [{"role": "system", "content": task}, {"role": "user", "content": conversation}]


# Answer files in the formats of FastChat and Spec-Bench


def _step_lengths(answer: TimedAnswer) -> list[int]:
    """Count the tokens of each step: the accepted ones and one token of the target model. The last
    step may have fewer, because the answer may end in it.
    """
    lengths = [accepted + 1 for accepted in answer.accepted]
    if lengths:
        total = 1 + sum(lengths)  # the first token comes from the prefill
        lengths[-1] -= total - len(answer.tokens)
    return lengths


def model_answers(records: Sequence[Turn], model_id: str) -> list[dict[str, Any]]:
    """Build one `model_answer` line per question, with FastChat's keys and the keys that Spec-Bench
    adds.

    Spec-Bench's `accept_lengths` counts all tokens of a step, including the target model's token.
    """
    questions: dict[int | str, list[Turn]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    lines = []
    for question_id, turns in questions.items():
        texts = [turn.text for turn in turns]
        answers = [turn.answer for turn in turns]
        content = json.dumps([model_id, question_id, texts])
        choice = {
            "index": 0,
            "turns": texts,
            "decoding_steps": [answer.steps for answer in answers],
            "new_tokens": [len(answer.tokens) for answer in answers],
            "wall_time": [answer.seconds for answer in answers],
            "accept_lengths": [length for answer in answers for length in _step_lengths(answer)],
        }
        line = {
            "question_id": question_id,
            "category": turns[0].category,
            "answer_id": hashlib.sha256(content.encode()).hexdigest()[:22],
            "model_id": model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }
        lines.append(line)
    return lines
