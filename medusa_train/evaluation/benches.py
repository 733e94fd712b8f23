"""The benches that can be named, and where their question files are looked for. Knows no model and no file format."""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_train.config.hub import file_from_hub, hub_is_out_of_reach
from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.errors import DataError
from medusa_train.evaluation.questions import Question, read_questions

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
        if not hub_is_out_of_reach():
            note(f"bench {name}: not on this machine, asking the Hugging Face hub for {known.hub_repo} ...")
        return file_from_hub(known.hub_repo, known.hub_file)
    if known.url is None or hub_is_out_of_reach():
        return None
    note(f"bench {name}: not on this machine, fetching {known.url} ...")
    target = _download_directory() / name / FILES[0]
    fresh = target.with_name(target.name + ".new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(known.url, timeout=FETCH_SECONDS) as answer, fresh.open("wb") as file:
            shutil.copyfileobj(answer, file)
        read_questions(fresh)  # a page that says "not found" is not kept
        os.replace(fresh, target)
    except (OSError, DataError):
        fresh.unlink(missing_ok=True)
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
