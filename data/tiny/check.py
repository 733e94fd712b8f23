"""Judge the tiny backbone's greedy answers: do they end, do they loop, are they distinct, does the code parse?

    python data/tiny/check.py data/bench/tiny/question.jsonl     # a question file in MT-Bench's form

Looping or canned answers flatter every speedup of speculative decoding, so a backbone has to pass this first.
Knows nothing of how the model was trained; works on any Hugging Face directory with a chat template.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOOP_LENGTH, LOOP_TIMES = 8, 3  # an answer loops if it holds a sequence of 8 tokens three times


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its tokens without eos, its text, whether eos came within the limit."""

    category: str
    asked: str
    tokens: list[int]
    text: str
    ended: bool

    @property
    def is_code(self) -> bool:
        """Whether the question's category begins with "code" or "coding"."""
        return self.category.startswith(("code", "coding"))


@dataclass(frozen=True)
class Figures:
    """The five figures, shares in 0..1, and the bars that they have to clear."""

    ended: float
    looping: float
    distinct: float
    median_tokens: float
    parsing: float | None

    def rows(self) -> list[tuple[str, str, str, bool]]:
        """(what, value, bar, cleared) of each figure."""
        rows = [
            ("end with eos within the limit", f"{self.ended:.1%}", "90 % or more", self.ended >= 0.9),
            (
                "hold an 8-token sequence three times",
                f"{self.looping:.1%}",
                "5 % or less",
                self.looping <= 0.05,
            ),
            ("distinct", f"{self.distinct:.1%}", "95 % or more", self.distinct >= 0.95),
            ("median length in tokens", f"{self.median_tokens:g}", "50 or more", self.median_tokens >= 50),
        ]
        if self.parsing is not None:
            rows.append(("code that parses", f"{self.parsing:.1%}", "80 % or more", self.parsing >= 0.8))
        return rows


def loops(tokens: Sequence[int]) -> bool:
    """Whether some sequence of 8 tokens occurs three times."""
    windows = Counter(tuple(tokens[start : start + LOOP_LENGTH]) for start in range(len(tokens) - LOOP_LENGTH + 1))
    return any(count >= LOOP_TIMES for count in windows.values())


def parses(text: str) -> bool:
    """Whether an answer is Python code as it stands."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def judge(answers: Sequence[Answer]) -> Figures:
    """The five figures of some answers (at least one)."""
    code = [answer for answer in answers if answer.is_code]
    count = len(answers)
    return Figures(
        ended=sum(answer.ended for answer in answers) / count,
        looping=sum(loops(answer.tokens) for answer in answers) / count,
        distinct=len({answer.text for answer in answers}) / count,
        median_tokens=statistics.median(len(answer.tokens) for answer in answers),
        parsing=sum(parses(answer.text) for answer in code) / len(code) if code else None,
    )


def read_questions(path: Path) -> list[dict]:
    """Questions in MT-Bench's form; exits with file and line where one is broken."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            question = json.loads(line)
            question["category"], question["turns"][0]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise SystemExit(f"{path}, line {number}: not a question with category and turns ({error!r})") from None
        questions.append(question)
    return questions


def answer_all(model_directory: Path, questions: Sequence[dict], dtype: str, limit: int) -> list[Answer]:
    """Greedy answers to every turn of every question, with the answers before it as history."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=getattr(torch, dtype)).eval()
    answers = []
    for question in questions:
        messages: list[dict[str, str]] = []
        for asked in question["turns"]:
            messages.append({"role": "user", "content": asked})
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            with torch.no_grad():
                output = model.generate(**prompt, max_new_tokens=limit, do_sample=False)
            tokens = output[0, prompt["input_ids"].shape[1] :].tolist()
            ended = tokens[-1] == tokenizer.eos_token_id
            tokens = tokens[:-1] if ended else tokens
            text = tokenizer.decode(tokens)
            messages.append({"role": "assistant", "content": text})
            answers.append(Answer(question["category"], asked, tokens, text, ended))
    return answers


def table(figures: Figures) -> str:
    """The figures as a Markdown table."""
    lines = ["| Of the greedy answers | | bar |", "|---|---|---|"]
    lines += [f"| {what} | {value} | {bar}{'' if ok else ' (missed)'} |" for what, value, bar, ok in figures.rows()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit 1 where one misses its bar."""
    parser = argparse.ArgumentParser(
        description="Judge greedy answers to a question file: endings, loops, repeats, length, code that parses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("questions", type=Path, help="question file in MT-Bench's form, JSONL")
    parser.add_argument("--model", type=Path, default=HERE, help="Hugging Face model directory")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="an answer ends within so many tokens")
    parser.add_argument("--show", action="store_true", help="print every question and answer as well")
    options = parser.parse_args(arguments)
    answers = answer_all(options.model, read_questions(options.questions), options.dtype, options.max_new_tokens)
    if options.show:
        for answer in answers:
            loop, broken = loops(answer.tokens), answer.is_code and not parses(answer.text)
            marks = [
                word for word, is_so in (("loops", loop), ("broken code", broken), ("cut", not answer.ended)) if is_so
            ]
            print(f"--- {answer.category} {' '.join(marks)}\n> {answer.asked}\n{answer.text}\n")
    figures = judge(answers)
    print(f"{len(answers)} answers in {options.dtype}\n\n{table(figures)}")
    return 0 if all(ok for *_, ok in figures.rows()) else 1


if __name__ == "__main__":
    sys.exit(main())
