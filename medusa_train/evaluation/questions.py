"""Find and read a bench: its question file in MT-Bench's, HumanEval's or GSM8K's format.

MT-Bench's format has one JSON object per line: `question_id` (number or text), `category` (text, optional), `turns`
(the user's messages, asked one after the other) and `reference` (reference answers, optional).
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
from medusa_train.data.record_files import parquet_rows
from medusa_train.errors import DataError
from medusa_train.hub import fetch_dataset_file, hub_is_unreachable
from medusa_train.io import replace_file

BENCH_DIR_VARIABLE = "MEDUSA_BENCH_DIR"
MAX_REPORTED_PROBLEMS = 5
FETCH_TIMEOUT = 15  # seconds
#: HumanEval's prompts are the beginning of a file; a chat model needs an instruction.
HUMANEVAL_INSTRUCTION = "Complete this Python function. Answer with the whole function.\n\n"


@dataclass(frozen=True)
class Question:
    """One question of a bench.

    Attributes:
        turns: the user's messages.
        source: where it was read, as `file:line`.
        reference: reference answers, one per turn as far as there are any.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    source: str
    reference: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """A bench: its name, its question file, and the questions in the file's order."""

    name: str
    path: Path
    questions: tuple[Question, ...]

    def limited(self, limit: int | None) -> Bench:
        """Return a bench of `limit` questions, taken from the categories in turn (None: of all questions).

        Bench files are sorted by category, so their first lines would cover one category only.
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
class NamedBench:
    """Where a bench that is known by name comes from.

    Attributes:
        folders: usual names of its folder.
        origin: its public source, for messages.
        hub_repo, hub_file: dataset and file on the Hugging Face hub, if it is there.
        url: where it is downloaded from otherwise.
    """

    folders: tuple[str, ...]
    origin: str
    hub_repo: str | None = None
    hub_file: str | None = None
    url: str | None = None


NAMED_BENCHES = {
    "tiny": NamedBench(("tiny",), "this project's data/bench/tiny/question.jsonl"),
    "mtbench": NamedBench(
        ("mtbench", "mt_bench"),
        "https://huggingface.co/datasets/HuggingFaceH4/mt_bench_prompts (raw/question.jsonl)",
        "HuggingFaceH4/mt_bench_prompts",
        "raw/question.jsonl",
    ),
    "specbench": NamedBench(
        ("specbench", "spec_bench"),
        "https://github.com/hemingkkk/Spec-Bench (data/spec_bench/question.jsonl)",
        url="https://raw.githubusercontent.com/hemingkkk/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "humaneval": NamedBench(
        ("humaneval",),
        "https://huggingface.co/datasets/openai/openai_humaneval (its parquet file, or HumanEval.jsonl)",
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
    ),
    "gsm8k": NamedBench(
        ("gsm8k",),
        "https://huggingface.co/datasets/openai/gsm8k (main/test-00000-of-00001.parquet, or test.jsonl)",
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
    ),
}
#: Names of a question file in a bench's folder; messages name the first.
FILES = ("question.jsonl", "test.jsonl", "HumanEval.jsonl", "HumanEval.jsonl.gz", "test-00000-of-00001.parquet")


def load_bench(name_or_file: str, note: Callable[[str], None] = lambda line: None) -> Bench:
    """Find and read a bench.

    Args:
        name_or_file: a name of `NAMED_BENCHES`, the name of a folder of `MEDUSA_BENCH_DIR`, or a question file.
        note: called with a line before a download.

    Raises:
        DataError: there is no such bench (the message names the file to provide), or its file is invalid.
    """
    path = find_bench(name_or_file, note)
    is_file = name_or_file not in NAMED_BENCHES and resolve_path(name_or_file) == path
    return Bench(_name_of_file(path) if is_file else name_or_file, path, read_questions(path))


def find_bench(name_or_file: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """Return the path of a bench's question file, downloaded if necessary; see `load_bench`."""
    if name_or_file not in NAMED_BENCHES:
        path = resolve_path(name_or_file)
        if path is not None and path.is_file():
            return path
    candidates = _candidates(name_or_file)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    named = NAMED_BENCHES.get(name_or_file)
    if named is None:
        raise DataError(_unknown_bench(name_or_file, candidates))
    downloaded = _download(name_or_file, named, note)
    if downloaded is None:
        raise DataError(_missing_bench(name_or_file, named))
    return downloaded


def _candidates(name: str) -> list[Path]:
    folders = NAMED_BENCHES[name].folders if name in NAMED_BENCHES else (name,)
    paths: list[Path] = []
    if os.environ.get(BENCH_DIR_VARIABLE):
        root = Path(os.environ[BENCH_DIR_VARIABLE]).expanduser()
        paths += [root / folder / file for folder in folders for file in FILES]
        paths += [root / f"{folder}.jsonl" for folder in folders]
    for root in (PROJECT_ROOT / "data" / "bench", _download_directory()):
        paths += [root / folder / file for folder in folders for file in FILES]
    return paths


def _download_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "medusa-train" / "bench"


def _download(name: str, bench: NamedBench, note: Callable[[str], None]) -> Path | None:
    """Return the file from the hub or its cache, or from the bench's URL; None if it is in neither."""
    if bench.hub_repo is not None and bench.hub_file is not None:
        if not hub_is_unreachable():
            note(f"bench {name}: not on this machine, asking the Hugging Face hub for {bench.hub_repo} ...")
        return fetch_dataset_file(bench.hub_repo, bench.hub_file)
    url = bench.url
    if url is None or hub_is_unreachable():
        return None
    note(f"bench {name}: not on this machine, downloading {url} ...")
    target = _download_directory() / name / FILES[0]

    def write(temporary: Path) -> None:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT) as answer, temporary.open("wb") as file:
            shutil.copyfileobj(answer, file)
        read_questions(temporary)  # an error page is not kept

    try:
        replace_file(target, write)
    except (OSError, DataError):
        return None
    return target


def _missing_bench(name: str, bench: NamedBench) -> str:
    is_public = bench.hub_repo is not None or bench.url is not None
    tried = " and it could not be downloaded" if is_public else ""
    return (
        f"bench {name!r}: its question file is not on this machine{tried}.\n"
        f"Get it from {bench.origin} and put it at {PROJECT_ROOT / 'data' / 'bench' / name / 'question.jsonl'},\n"
        f"or set {BENCH_DIR_VARIABLE} to a directory that holds {name}/question.jsonl or {name}.jsonl."
    )


def _unknown_bench(name: str, candidates: list[Path]) -> str:
    paths = "".join(f"\n  {path}" for path in [Path(name), *candidates] if path.name in (name, FILES[0]))
    return f"bench {name!r}: no such file, and no bench of that name ({', '.join(NAMED_BENCHES)}). Looked for:{paths}"


def _name_of_file(path: Path) -> str:
    """Return NAME for `.../NAME/question.jsonl` and for `.../NAME.jsonl`."""
    return path.parent.name if path.name in FILES and path.parent.name else path.name.split(".")[0]


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a question file.

    Raises:
        DataError: the file cannot be read, has no questions, or has invalid lines (the first few with `file:line`).
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
        shown = problems[:MAX_REPORTED_PROBLEMS] + ([f"... and {more} more invalid lines"] if more > 0 else [])
        raise DataError("\n".join(shown))
    if not questions:
        raise DataError(f"{path}: holds no questions; one JSON object per line is expected")
    return tuple(questions)


def _lines(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Yield (number from 1, record) of the lines that are not empty, or of the rows of a parquet file."""
    if path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), start=1)
        return
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    # Not splitlines(), which also splits at U+2028, legal within JSON strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: str | dict[str, Any], source: str, number: int) -> Question:
    """Parse a line, or a row of a table; raises ValueError with the reason."""
    record = line
    if isinstance(line, str):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
    if isinstance(record.get("task_id"), str) and isinstance(record.get("prompt"), str):
        return Question(record["task_id"], "humaneval", (HUMANEVAL_INSTRUCTION + record["prompt"],), source)
    if isinstance(record.get("question"), str) and isinstance(record.get("answer"), str):
        return Question(number, "gsm8k", (record["question"],), source, (record["answer"],))
    # The hub's copy of MT-Bench calls the turns `prompt` and, in its parquet form, the id `prompt_id`.
    question_id = record.get("question_id", record.get("prompt_id"))
    if isinstance(question_id, bool) or not isinstance(question_id, (int, str)):
        raise ValueError("question_id is missing or neither a number nor text")
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns is missing or not a list of the user's messages")
    for position, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"turn {position} is empty or not text")
    category = record.get("category", "general")
    if not isinstance(category, str) or not category.strip():
        raise ValueError("category is empty or not text")
    reference = record.get("reference")
    answers = [reference] if isinstance(reference, str) else reference if isinstance(reference, list) else []
    texts = tuple(answer for answer in answers if isinstance(answer, str))
    return Question(question_id, category.strip(), tuple(turns), source, texts)
