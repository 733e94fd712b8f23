import json
from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.errors import DataError
from medusa_train.evaluation import benches
from medusa_train.evaluation.benches import Bench, Question, find_bench, load_bench, read_questions

GOOD = {"question_id": 81, "category": "writing", "turns": ["Say something.", "Say it again."]}


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_reads_questions_with_turns_category_and_place(tmp_path: Path) -> None:
    path = write(tmp_path / "question.jsonl", GOOD, "", {"question_id": "x", "turns": ["Only one."], "reference": []})
    first, second = read_questions(path)
    assert first == Question(81, "writing", ("Say something.", "Say it again."), f"{path}:1")
    assert second == Question("x", "general", ("Only one.",), f"{path}:3")


def test_reads_the_hub_copy_of_mt_bench(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"prompt_id": 5, "category": "math", "prompt": ["One?", "Two?"]})
    assert read_questions(path)[0].turns == ("One?", "Two?")


def test_a_line_separator_inside_a_text_does_not_break_the_line(tmp_path: Path) -> None:
    record = {"question_id": 1, "turns": ["one\u2028two"]}
    path = write(tmp_path / "q.jsonl", json.dumps(record, ensure_ascii=False))
    assert read_questions(path)[0].turns == ("one\u2028two",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "found list"),
        ({"turns": ["a"]}, "question_id is missing"),
        ({"question_id": True, "turns": ["a"]}, "question_id is missing"),
        ({"question_id": 1}, "turns is missing"),
        ({"question_id": 1, "turns": []}, "turns is missing"),
        ({"question_id": 1, "turns": "a"}, "turns is missing"),
        ({"question_id": 1, "turns": ["a", "  "]}, "turn 2 is empty"),
        ({"question_id": 1, "turns": ["a"], "category": 3}, "category"),
        (GOOD, "used before"),
    ],
)
def test_a_broken_line_is_named_with_file_line_and_reason(tmp_path: Path, line: object, reason: str) -> None:
    path = write(tmp_path / "q.jsonl", GOOD, line)
    with pytest.raises(DataError) as caught:
        read_questions(path)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)


def test_many_broken_lines_are_shown_up_to_five_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", GOOD, *["{"] * 8)
    with pytest.raises(DataError) as caught:
        read_questions(path)
    message = str(caught.value)
    assert f"{path}:6: " in message
    assert f"{path}:7: " not in message
    assert "3 more" in message


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no questions"):
        read_questions(write(tmp_path / "q.jsonl", ""))


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_questions(path)


@pytest.mark.parametrize("place", ["mtbench/question.jsonl", "mt_bench/question.jsonl", "mtbench.jsonl"])
def test_the_users_bench_directory_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = write(tmp_path / place, GOOD)
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    bench = load_bench("mtbench")
    assert (bench.name, bench.path) == ("mtbench", path)


def test_a_bench_of_ones_own_by_name_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "mine" / "question.jsonl", GOOD)
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    assert load_bench("mine").name == "mine"
    assert load_bench(str(path)).name == "mine"
    assert load_bench(str(write(tmp_path / "other.jsonl", GOOD))).name == "other"


def test_a_directory_called_like_a_bench_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    path = write(tmp_path / "tiny.jsonl", GOOD)
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    assert find_bench("tiny") == path


def test_an_unknown_bench_lists_the_known_ones_and_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(DataError) as caught:
        find_bench("tinny")
    message = str(caught.value)
    assert "tiny, mtbench, specbench" in message
    assert str(tmp_path / "tinny" / "question.jsonl") in message
    assert str(PROJECT_ROOT / "data" / "bench" / "tinny" / "question.jsonl") in message


def test_a_known_bench_that_is_not_here_says_which_file_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(benches.BENCH_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(benches, "PROJECT_ROOT", tmp_path)
    with pytest.raises(DataError) as caught:
        find_bench("specbench")
    message = str(caught.value)
    assert str(tmp_path / "data" / "bench" / "specbench" / "question.jsonl") in message
    assert "hemingkkk/Spec-Bench" in message
    assert benches.BENCH_DIR_VARIABLE in message


def test_a_bench_with_a_home_on_the_hub_is_fetched_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = write(tmp_path / "cache" / "question.jsonl", GOOD)
    asked: list[tuple[str, str]] = []

    def fetch(repo: str, filename: str) -> Path:
        asked.append((repo, filename))
        return fetched

    monkeypatch.delenv(benches.BENCH_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(benches, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(benches, "file_from_hub", fetch)
    monkeypatch.setattr(benches, "hub_is_out_of_reach", lambda: False)
    told: list[str] = []
    assert load_bench("mtbench", told.append) == Bench("mtbench", fetched, read_questions(fetched))
    assert "HuggingFaceH4/mt_bench_prompts" in told[0]
    assert asked == [("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")]


@pytest.mark.parametrize("out_of_reach", [True, False])
def test_where_the_hub_is_out_of_reach_only_its_cache_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out_of_reach: bool
) -> None:
    asked: list[bool] = []

    def download(repo: str, filename: str, *, repo_type: str, local_files_only: bool) -> str:
        asked.append(local_files_only)
        raise OSError("nowhere")

    monkeypatch.delenv(benches.BENCH_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(benches, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(benches, "hub_is_out_of_reach", lambda: out_of_reach)
    monkeypatch.setattr("medusa_train.config.hub.hub_is_out_of_reach", lambda: out_of_reach)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    told: list[str] = []
    with pytest.raises(DataError, match="could not be fetched"):
        load_bench("mtbench", told.append)
    assert asked == [out_of_reach]
    assert bool(told) is not out_of_reach


def test_limit_takes_from_every_category_and_keeps_the_order() -> None:
    questions = tuple(Question(n, category, ("?",), f"f:{n}") for n, category in enumerate("aaabbc"))
    bench = Bench("b", Path("f"), questions)
    assert [question.question_id for question in bench.limited(4).questions] == [0, 1, 3, 5]
    assert bench.limited(None) is bench
    assert bench.limited(99) is bench
