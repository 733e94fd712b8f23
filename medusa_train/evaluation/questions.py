"""Reads question files: MT-Bench's form, HumanEval's and GSM8K's own. Knows no bench by name and no model.

A question file in MT-Bench's form holds one JSON object per line: `question_id` (number or text), `category` (text,
optional), `turns` (the user's messages, asked one after the other) and `reference` (answers to judge by, optional).
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.data.sources import parquet_rows
from medusa_train.errors import DataError
from medusa_train.hub import fetch_dataset_file, hub_is_unreachable
from medusa_train.io import replace_file

MAX_REPORTED_PROBLEMS = 5
#: HumanEval's prompts are the beginning of a file; a chat model has to be told what to do with it.
COMPLETE = "Complete this Python function. Answer with the whole function.\n\n"


@dataclass(frozen=True)
class Question:
    """One question of a bench: the user's turns, where they stand (`file:line`), and reference answers if any."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    source: str
    reference: tuple[str, ...] = ()


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a question file.

    Raises DataError naming `file:line` and the reason for the first few broken lines, or when there is none at all.
    """
    questions: list[Question] = []
    problems: list[str] = []
    first_seen: dict[int | str, str] = {}
    for number, line in _lines(path):
        source = f"{path}:{number}"
        try:
            question = _parse(line, source, number)
            earlier = first_seen.setdefault(question.question_id, source)
            if earlier != source:
                raise ValueError(f"question_id {question.question_id!r} was used before, at {earlier}")
        except ValueError as error:
            problems.append(f"{source}: {error}")
            continue
        questions.append(question)
    if problems:
        more = len(problems) - MAX_REPORTED_PROBLEMS
        shown = problems[:MAX_REPORTED_PROBLEMS] + ([f"... and {more} more broken lines"] if more > 0 else [])
        raise DataError("\n".join(shown))
    if not questions:
        raise DataError(f"{path}: holds no questions; one JSON object per line is expected")
    return tuple(questions)


def _lines(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """The records of a file with their numbers: lines that are not empty, or the rows of a parquet file."""
    if path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), start=1)
        return
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    # Not splitlines(): JSON strings may hold U+2028 and the like, which it would break lines at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: str | dict[str, Any], source: str, number: int) -> Question:
    record = line
    if isinstance(line, str):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
    if isinstance(record.get("task_id"), str) and isinstance(record.get("prompt"), str):
        return Question(record["task_id"], "humaneval", (COMPLETE + record["prompt"],), source)
    if isinstance(record.get("question"), str) and isinstance(record.get("answer"), str):
        return Question(number, "gsm8k", (record["question"],), source, (record["answer"],))
    # The hub's copy of MT-Bench calls the turns `prompt`, and once converted the id `prompt_id`.
    question_id = record.get("question_id", record.get("prompt_id"))
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise ValueError("question_id is missing or neither a number nor text")
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns is missing or not a list of the user's messages")
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"turn {place} is empty or not text")
    category = record.get("category", "general")
    if not isinstance(category, str) or not category.strip():
        raise ValueError("category is empty or not text")
    return Question(question_id, category.strip(), tuple(turns), source, _reference(record.get("reference")))


def _reference(found: object) -> tuple[str, ...]:
    """The reference answers, one per turn, as far as they are there."""
    given = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return tuple(item for item in given if isinstance(item, str))


BENCH_DIR_VARIABLE = "MEDUSA_BENCH_DIR"
FETCH_SECONDS = 15


@dataclass(frozen=True)
class Bench:
    """A question file that was read: its short name, the file, and its questions in the file's order."""

    name: str
    path: Path
    questions: tuple[Question, ...]

    def limited(self, limit: int | None) -> Bench:
        """The first `limit` questions, taken from the categories in turn.

        Bench files are sorted by category, so their first lines alone would measure one category only.
        """
        if limit is None or limit >= len(self.questions):
            return self
        seen: Counter[str] = Counter()
        rounds: dict[int, int] = {}
        for index, question in enumerate(self.questions):
            rounds[index] = seen[question.category]
            seen[question.category] += 1
        chosen = sorted(sorted(rounds, key=lambda index: (rounds[index], index))[:limit])
        return Bench(self.name, self.path, tuple(self.questions[index] for index in chosen))


@dataclass(frozen=True)
class _Known:
    """What is known of a named bench.

    `folders` are its usual folder names, `home` says where it comes from; `hub_repo` and `hub_file` are its file on
    the hub, `url` is where it is fetched from otherwise.
    """

    folders: tuple[str, ...]
    home: str
    hub_repo: str | None = None
    hub_file: str | None = None
    url: str | None = None


KNOWN = {
    "tiny": _Known(("tiny",), "this project's data/bench/tiny/question.jsonl"),
    "mtbench": _Known(
        ("mtbench", "mt_bench"),
        "https://huggingface.co/datasets/HuggingFaceH4/mt_bench_prompts (raw/question.jsonl)",
        "HuggingFaceH4/mt_bench_prompts",
        "raw/question.jsonl",
    ),
    "specbench": _Known(
        ("specbench", "spec_bench"),
        "https://github.com/hemingkkk/Spec-Bench (data/spec_bench/question.jsonl)",
        url="https://raw.githubusercontent.com/hemingkkk/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "humaneval": _Known(
        ("humaneval",),
        "https://huggingface.co/datasets/openai/openai_humaneval (its parquet file, or HumanEval.jsonl)",
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
    ),
    "gsm8k": _Known(
        ("gsm8k",),
        "https://huggingface.co/datasets/openai/gsm8k (main/test-00000-of-00001.parquet, or test.jsonl)",
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
    ),
}
#: What a bench's file may be called in its folder; the first is what we ask for.
FILES = ("question.jsonl", "test.jsonl", "HumanEval.jsonl", "HumanEval.jsonl.gz", "test-00000-of-00001.parquet")


def load_bench(name_or_file: str, note: Callable[[str], None] = lambda line: None) -> Bench:
    """Find and read a bench given by name (one of `KNOWN`, or a folder of your own) or by file.

    `note` is told when the hub is asked, which may take a while.

    Raises DataError when there is no such bench (the message says which file to put where) or its file is broken.
    """
    path = find_bench(name_or_file, note)
    is_file = name_or_file not in KNOWN and resolve_path(name_or_file) == path
    return Bench(_name_of_file(path) if is_file else name_or_file, path, read_questions(path))


def find_bench(name_or_file: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """Path of a bench's question file; see `load_bench`."""
    if name_or_file not in KNOWN:
        path = resolve_path(name_or_file)
        if path is not None and path.is_file():
            return path
    candidates = _candidates(name_or_file)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = KNOWN.get(name_or_file)
    if known is None:
        raise DataError(_unknown_bench(name_or_file, candidates))
    fetched = _fetch(name_or_file, known, note)
    if fetched is not None:
        return fetched
    raise DataError(_missing_bench(name_or_file, known))


def _fetch(name: str, known: _Known, note: Callable[[str], None]) -> Path | None:
    """The file from the hub's cache or the bench's public home; None where neither has it."""
    if known.hub_repo is not None and known.hub_file is not None:
        if not hub_is_unreachable():
            note(f"bench {name}: not on this machine, asking the Hugging Face hub for {known.hub_repo} ...")
        return fetch_dataset_file(known.hub_repo, known.hub_file)
    if known.url is None or hub_is_unreachable():
        return None
    note(f"bench {name}: not on this machine, fetching {known.url} ...")
    url, target = known.url, _download_directory() / name / FILES[0]

    def download(path: Path) -> None:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
        read_questions(path)  # raises for an error page

    try:
        replace_file(target, download)
    except (OSError, DataError):
        return None
    return target


def _download_directory() -> Path:
    """Where fetched question files are kept."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "medusa-train" / "bench"


def _candidates(name: str) -> list[Path]:
    folders = KNOWN[name].folders if name in KNOWN else (name,)
    paths: list[Path] = []
    if os.environ.get(BENCH_DIR_VARIABLE):
        root = Path(os.environ[BENCH_DIR_VARIABLE]).expanduser()
        paths += [root / folder / file for folder in folders for file in FILES]
        paths += [root / f"{folder}.jsonl" for folder in folders]
    for root in (PROJECT_ROOT / "data" / "bench", _download_directory()):
        paths += [root / folder / file for folder in folders for file in FILES]
    return paths


def _missing_bench(name: str, known: _Known) -> str:
    at_home = known.hub_repo is not None or known.url is not None
    tried = " and it could not be fetched from its public home" if at_home else ""
    return (
        f"bench {name!r}: its question file is not on this machine{tried}.\n"
        f"Get it from {known.home} and put it at {PROJECT_ROOT / 'data' / 'bench' / name / 'question.jsonl'},\n"
        f"or set {BENCH_DIR_VARIABLE} to a directory that holds {name}/question.jsonl or {name}.jsonl."
    )


def _unknown_bench(name: str, candidates: list[Path]) -> str:
    looked = "".join(f"\n  {path}" for path in [Path(name), *candidates] if path.name in (name, FILES[0]))
    return f"bench {name!r}: no such file, and no bench of that name ({', '.join(KNOWN)}). Looked for:{looked}"


def _name_of_file(path: Path) -> str:
    """`.../NAME/question.jsonl` and `.../NAME.jsonl` are both called NAME."""
    return path.parent.name if path.name in FILES and path.parent.name else path.name.split(".")[0]
