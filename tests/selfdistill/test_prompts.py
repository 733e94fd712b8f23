import json
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.load import load_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.report import COLUMNS, Unread
from medusa_train.errors import DataError
from medusa_train.selfdistill.prompts import Prompt, read_prompts, select_prompts
from tests.tool_chats import CHAT, TOOL

SEEDS = [Prompt(f"s{n}", (f"question {n}", "and more")) for n in range(200)]


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_four_forms_give_the_users_turns(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "seeds.jsonl",
        {
            "id": "a",
            "conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "one"}],
        },
        {
            "id": "b",
            "conversations": [{"from": "human", "value": "one"}, {"from": "human", "value": "two"}],
        },
        {
            "id": 3,
            "messages": [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}],
        },
        {"instruction": "do", "input": "this", "output": "ignored"},
        {"question_id": 81, "category": "c", "turns": ["q1", "q2"]},
    )
    seeds = read_prompts(path)
    assert [seed.turns for seed in seeds] == [
        ("one",),
        ("one", "two"),
        ("hi",),
        ("do\n\nthis",),
        ("q1", "q2"),
    ]
    assert [seed.id for seed in seeds][:3] == ["a", "b", "3"]
    assert seeds[4].id == "81"
    assert seeds[2].system == "sys"
    assert seeds[1].source == f"{path}:2"


def test_requests_of_a_batch_file_are_prompts(tmp_path: Path) -> None:
    """As `vllm run-batch` and OpenAI's batches read them."""
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages}
    request = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    unread = Unread()
    (prompt,) = read_prompts(jsonl(tmp_path / "batch.jsonl", request), unread=unread)
    assert (prompt.id, prompt.turns, prompt.system) == ("r-1", ("hi",), "sys")
    assert unread == {(COLUMNS, "model"): 1}
    read_prompts(jsonl(tmp_path / "batch.jsonl", request | {"foo": 3}), unread=unread)
    assert unread == {(COLUMNS, "model"): 2, (COLUMNS, "foo"): 1}


def test_an_array_is_read_too_records_without_a_user_are_left_out_and_ids_get_numbers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "seeds.json"
    talk = {"id": "same", "conversations": [{"from": "human", "value": "hello\u2028there"}]}
    silent = {
        "id": "x",
        "conversations": [{"from": "gpt", "value": "only me"}, {"from": "human", "value": "  "}],
    }
    path.write_text(json.dumps([talk, silent, talk]), encoding="utf-8")
    sources = [("same", f"{path}:record 1"), ("same~2", f"{path}:record 3")]
    assert [(seed.id, seed.source) for seed in read_prompts(path)] == sources


def test_ids_are_made_of_the_text_where_there_are_none(tmp_path: Path) -> None:
    first, second = read_prompts(jsonl(tmp_path / "s.jsonl", {"turns": ["a"]}, {"turns": ["b"]}))
    assert first.id != second.id
    assert first.id == read_prompts(jsonl(tmp_path / "t.jsonl", {"turns": ["a"]}))[0].id


def test_half_a_surrogate_pair_does_not_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"turns": ["a \\ud83d b"]}\n', encoding="utf-8")
    assert read_prompts(path)[0].turns == ("a ? b",)


def test_broken_records_are_told_together_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "seeds.jsonl"
    path.write_text(
        '{"turns": ["ok"]}\n{"turns": [\n[1]\n{"turns": [5]}\n{"what": 1}\n', encoding="utf-8"
    )
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert f"{path}:2: not valid JSON" in message
    assert f"{path}:3: a record must be a JSON object" in message
    assert f"{path}:4: turn 1: 'content' must be a string" in message
    assert f"{path}:5: unknown record format" in message
    assert f"{path}:1:" not in message
    assert "skip_bad_records" in message
    # skipping all of them is no way on: the message still counts them and gives a reason
    bad = jsonl(tmp_path / "bad.jsonl", {"what": 1}, {"what": 2})
    with pytest.raises(DataError, match=r"2 invalid records\n.*bad\.jsonl:1: unknown record"):
        read_prompts(bad, skipped=[])


@pytest.mark.parametrize(
    ("text", "message"), [("", "no user message"), ('[{"turns": ["a"]},', ": not valid JSON")]
)
def test_a_file_without_seeds_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "seeds.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_prompts(path)


def test_an_id_that_comes_again_never_meets_one_of_the_file(tmp_path: Path) -> None:
    ids = ["a", "a~2", "a", "a"]
    path = jsonl(
        tmp_path / "s.jsonl", *({"id": name, "turns": [str(n)]} for n, name in enumerate(ids))
    )
    names = [seed.id for seed in read_prompts(path)]
    assert names[:2] == ["a", "a~2"]
    assert len(set(names)) == 4


def choice(**keys: Any) -> SelfDistillConfig:
    return load_config(SelfDistillConfig, None, [f"{key}={value}" for key, value in keys.items()])


def names(seeds: list[Prompt]) -> list[str]:
    return [seed.id for seed in seeds]


def test_without_a_wish_all_distinct_seeds_come_in_their_order() -> None:
    again = [
        Prompt("x", ("question 3", "and more")),
        Prompt("y", ("question 3", "and more"), system="be brief"),
    ]
    chosen, left_out = select_prompts([*SEEDS, *again], choice())
    assert names(chosen) == [*names(SEEDS), "y"]
    assert left_out == {"repeated": 1}


def test_length_is_counted_over_the_turns_that_are_asked() -> None:
    seeds = [Prompt("a", ("1234", "56")), Prompt("b", ("123", "4")), Prompt("c", ("123", "789"))]
    chosen, left_out = select_prompts(seeds, choice(min_chars=5, max_chars=6))
    assert (names(chosen), left_out) == (["a", "c"], {"short": 1})
    assert select_prompts(seeds, choice(max_chars=5))[1] == {"long": 2}
    chosen, left_out = select_prompts(seeds, choice(max_turns=1))
    assert [seed.turns for seed in chosen] == [("1234",), ("123",)]
    assert left_out == {"repeated": 1}


def test_a_larger_sample_holds_the_smaller_and_another_seed_draws_others() -> None:
    small, large = (names(select_prompts(SEEDS, choice(sample=count))[0]) for count in (20, 60))
    assert set(small) < set(large)
    assert small == sorted(small, key=names(SEEDS).index)
    assert len(large) == 60
    assert names(select_prompts(SEEDS, choice(sample=20, sample_seed=1))[0]) != small
    assert names(select_prompts(SEEDS, choice(sample=20, limit=5))[0]) == small[:5]


def test_answers_of_a_chat_with_tools_are_prompts_spread_over_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "chats.jsonl", CHAT)
    prompts = read_prompts(path, turns_per_chat=2)
    assert [(prompt.id, len(prompt.messages)) for prompt in prompts] == [
        ("chat/1", 2),
        ("chat/2", 4),
    ]
    assert {prompt.turns for prompt in prompts} == {("Find both.",)}
    assert json.loads(prompts[0].variables) == {"tools": [TOOL]}
    everything = read_prompts(path, turns_per_chat=9)
    assert [len(prompt.messages) for prompt in everything] == [2, 4, 6]
    assert select_prompts(everything, choice())[0] == everything
    (talk,) = read_prompts(path)
    assert (talk.turns, talk.system, talk.messages) == (("Find both.",), "Be brief.", ())


def test_answers_after_max_turns_are_not_prompts(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]
    chat = {**CHAT, "messages": [*CHAT["messages"], *more]}
    prompts = read_prompts(jsonl(tmp_path / "chats.jsonl", chat), turns_per_chat=9)
    selected, skipped = select_prompts(prompts, choice(max_turns=1))
    assert (len(selected), skipped) == (3, {"after max_turns": 1})


def test_the_chosen_answers_are_spread_over_the_whole_chat(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]
    chat = {**CHAT, "messages": [*CHAT["messages"], *more]}
    prompts = read_prompts(jsonl(tmp_path / "chats.jsonl", chat), turns_per_chat=2)
    assert [len(prompt.messages) for prompt in prompts] == [2, 6]  # of four answers every other
