"""Writes a finished evaluation: report.json, report.md, report.html, answers.jsonl, model_answer/. Knows no model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_train.evaluation.fastchat import model_answers
from medusa_train.evaluation.markdown import markdown
from medusa_train.evaluation.metrics import is_looping
from medusa_train.evaluation.page.page import html_page
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.evaluation.report import Report, model_id, rows_of


def _answer_line(record: TurnRecord) -> dict[str, Any]:
    timed = record.answer
    return {
        "question_id": record.question_id,
        "category": record.category,
        "turn": record.turn,
        "asked": record.asked,
        "text": record.text,
        "pieces": list(record.pieces),
        "prompt_tokens": len(record.prompt_ids),
        "tokens": len(timed.tokens),
        "steps": timed.steps,
        "accepted": list(timed.accepted),
        "loops": is_looping(timed.tokens),
        "seconds": {
            "tree": None if record.tree is None else record.tree.seconds,
            **{name: answer.seconds for name, answer in record.baselines.items()},
        },
        "exact": {dtype: verdict.value for dtype, verdict in record.exact.items()},
    }


def write_report(
    report: Report, records: Sequence[TurnRecord], skipped: Sequence[SkippedTurn], directory: Path
) -> list[Path]:
    """Write report.json, report.md, report.html, answers.jsonl and FastChat's model_answer/MODEL.jsonl.

    `directory` is made if absent. Returns the files' paths.
    """
    answers = [_answer_line(record) for record in records]
    answers += [
        {"question_id": turn.question_id, "turn": turn.turn, "prompt_tokens": turn.prompt_tokens, "skipped": True}
        for turn in skipped
    ]
    contents = {
        "report.json": json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n",
        "report.md": markdown(report),
        "report.html": html_page(report.as_json(), answers, rows_of(report, terminal=False)),
        "answers.jsonl": "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers),
    }
    name = model_id(report.meta)
    contents[f"model_answer/{name}.jsonl"] = "".join(
        json.dumps(line, ensure_ascii=False) + "\n" for line in model_answers(records, name)
    )
    (directory / "model_answer").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        _replace(directory / name, content)
    return [directory / name for name in contents]


def _replace(path: Path, content: str) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)
