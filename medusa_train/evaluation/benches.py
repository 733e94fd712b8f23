"""Question files in MT-Bench's form: finds and reads them. Knows nothing of models or tokens.

A question file holds one JSON object per line: `question_id` (number or text), `category` (text, optional) and
`turns` (the user's messages, asked one after the other). Other keys (`reference`) are allowed and not read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_train.config.hub import file_from_hub, hub_is_out_of_reach
from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.errors import DataError

BENCH_DIR_VARIABLE = "MEDUSA_BENCH_DIR"
MAX_REPORTED_PROBLEMS = 5


@dataclass(frozen=True)
class Question:
    """One question of a bench: the user's turns, and where they stand (`file:line`)."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    source: str


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
    """What is known of a named bench: its usual folder names, its public home, and its file on the hub."""

    folders: tuple[str, ...]
    home: str
    hub_repo: str | None = None
    hub_file: str | None = None


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
    ),
}


def load_bench(name_or_file: str, note: Callable[[str], None] = lambda line: None) -> Bench:
    """Find and read a bench given by name (`tiny`, `mtbench`, `specbench`, a folder of your own) or by file.

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
    if known.hub_repo is not None and known.hub_file is not None:
        if not hub_is_out_of_reach():
            note(f"bench {name_or_file}: not on this machine, asking the Hugging Face hub for {known.hub_repo} ...")
        downloaded = file_from_hub(known.hub_repo, known.hub_file)
        if downloaded is not None:
            return downloaded
    raise DataError(_missing_bench(name_or_file, known))


def _candidates(name: str) -> list[Path]:
    folders = KNOWN[name].folders if name in KNOWN else (name,)
    paths: list[Path] = []
    if os.environ.get(BENCH_DIR_VARIABLE):
        root = Path(os.environ[BENCH_DIR_VARIABLE]).expanduser()
        paths += [root / folder / "question.jsonl" for folder in folders]
        paths += [root / f"{folder}.jsonl" for folder in folders]
    paths += [PROJECT_ROOT / "data" / "bench" / folder / "question.jsonl" for folder in folders]
    return paths


def _missing_bench(name: str, known: _Known) -> str:
    tried = "" if known.hub_repo is None else " and it could not be fetched from its public home"
    return (
        f"bench {name!r}: its question file is not on this machine{tried}.\n"
        f"Get it from {known.home} and put it at {PROJECT_ROOT / 'data' / 'bench' / name / 'question.jsonl'},\n"
        f"or set {BENCH_DIR_VARIABLE} to a directory that holds {name}/question.jsonl or {name}.jsonl."
    )


def _unknown_bench(name: str, candidates: list[Path]) -> str:
    looked = "".join(f"\n  {path}" for path in [Path(name), *candidates])
    return f"bench {name!r}: no such file, and no bench of that name ({', '.join(KNOWN)}). Looked for:{looked}"


def _name_of_file(path: Path) -> str:
    """`.../NAME/question.jsonl` and `.../NAME.jsonl` are both called NAME."""
    return path.parent.name if path.stem == "question" and path.parent.name else path.stem


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a question file.

    Raises DataError naming `file:line` and the reason for the first few broken lines, or when there is none at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    questions: list[Question] = []
    problems: list[str] = []
    first_seen: dict[int | str, str] = {}
    # Not splitlines(): JSON strings may hold U+2028 and the like, which it would break lines at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            question = _parse_line(line, source)
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


def _parse_line(line: str, source: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
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
    return Question(question_id, category.strip(), tuple(turns), source)
