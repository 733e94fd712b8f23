"""What is read of data, records, prompts and configurations, and what becomes of the rest: the rows
of docs/reference/inputs.md, one by one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.conftest import document
from tests.behaviour.seams import encode
from tests.behaviour.test_chats import chat
from tests.behaviour.world import (
    Ran,
    evaluate,
    export,
    metrics,
    read_json,
    read_lines,
    selfdistill,
    train,
    training_keys,
    write_lines,
)

Inspect = Callable[..., Ran]


@pytest.fixture
def inspect(model: Path, tmp_path: Path) -> Inspect:
    """Run `medusa-train --inspect` on data."""

    def run(*datasets: Any, **keys: Any) -> Ran:
        written = training_keys(model, Path("none"), tmp_path / "run", **keys)
        written["datasets"] = [
            entry if isinstance(entry, dict) else {"path": str(entry)} for entry in datasets
        ]
        return train("--inspect", **written)

    return run


def record(*words: str) -> dict[str, Any]:
    return {"messages": chat(*(words or ("one", "two")))}


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


# Data


def test_a_directory_is_read_by_split_and_the_rest_is_named(
    inspect: Inspect, tmp_path: Path
) -> None:
    home = tmp_path / "data"
    write_lines(home / "train-00000-of-00002.jsonl", [record("a", "b")])
    write_lines(home / "more.jsonl", [record("c", "d")])
    (home / "whole.json").write_text(json.dumps([record("e", "f"), record("g", "h")]))
    with gzip.open(home / "z.jsonl.gz", "wt") as file:
        file.write(json.dumps(record("i", "j")) + "\n")
    write_parquet(home / "p.parquet", [record("k", "l")])
    write_lines(home / "test.jsonl", [record("m", "n")] * 3)
    write_lines(home / ".hidden.jsonl", [record()])
    (home / "notes.csv").write_text("a,b\n")
    (home / "below").mkdir()
    shown = inspect(home).ok()
    shown.says("6 conversations")
    shown.says("not read:", "notes.csv", "below/", "test.jsonl", ".hidden.jsonl")
    shown.says("1 of 2 files train-N-of-")
    inspect({"path": str(home), "split": "test"}).ok().says("3 conversations")
    inspect({"path": str(home), "split": "validation"}).fails(2, "validation", "test, train")
    inspect({"path": str(home), "data_files": ["more.jsonl", "te*.jsonl"]}).ok().says(
        "4 conversations"
    )
    inspect({"path": str(home), "data_files": ["more.jsonl"], "split": "test"}).fails(
        2, "data_files"
    )
    inspect({"path": str(home), "name": "none"}).fails(2, "none")


def test_data_below_and_files_in_two_formats(inspect: Inspect, tmp_path: Path) -> None:
    home = tmp_path / "data"
    write_lines(home / "data" / "a.jsonl", [record()])
    (home / "data" / "a.json").write_text(json.dumps([record("c", "d")]))
    write_lines(home / "chat" / "train_sft-00000-of-00001.jsonl", [record("x", "y")])
    inspect(home).ok().says("2 conversations", "a.json and a.jsonl", "chat/")
    inspect({"path": str(home), "name": "chat"}).ok().says("1 conversation")
    write_lines(home / "chat" / "train_gen-00000-of-00001.jsonl", [record("x", "z")])
    inspect({"path": str(home), "name": "chat"}).fails(2, "train_sft", "train_gen")
    inspect({"path": str(home), "name": "chat", "split": "train_gen"}).ok()


def test_a_file_is_read_whole(inspect: Inspect, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "test.jsonl", [record()] * 2)
    inspect(path).ok().says("2 conversations")
    for keys in ({"split": "test"}, {"name": "x"}, {"data_files": ["a"]}, {"ds_type": "parquet"}):
        inspect({"path": str(path), **keys}).fails(2, next(iter(keys)))
    for name in ("a.csv", "a.jsonl.bz2"):
        (tmp_path / name).write_text("a\n")
        inspect(tmp_path / name).fails(1, name, "parquet")
    inspect(tmp_path / "none.jsonl").fails(1, "none.jsonl")


def test_formats_as_path(inspect: Inspect, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", [record("a", "b")])
    write_lines(tmp_path / "b.jsonl", [record("c", "d")])
    parquet = write_parquet(tmp_path / "c.parquet", [record("e", "f")])
    inspect({"path": "json", "data_files": [str(tmp_path / "*.jsonl")]}).ok().says(
        "2 conversations"
    )
    inspect({"path": "parquet", "data_files": [str(parquet)]}).ok().says("1 conversation")
    inspect({"path": "json"}).fails(2, "data_files")
    inspect({"path": "json", "data_files": [str(parquet)]}).fails(2, "json")
    inspect({"path": "csv", "data_files": [str(first)]}).fails(2, "csv")
    inspect({"path": "json", "data_files": [str(tmp_path / "none*")]}).fails(1, "none*")


def test_what_save_to_disk_wrote(inspect: Inspect, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [record("a", "b"), record("c", "d")]
    DatasetDict(
        {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}
    ).save_to_disk(tmp_path / "saved")
    inspect(tmp_path / "saved").ok().says("2 conversations", "test")
    inspect({"path": str(tmp_path / "saved"), "split": "test"}).ok().says("1 conversation")


def test_empty_files(inspect: Inspect, tmp_path: Path) -> None:
    home = tmp_path / "data"
    write_lines(home / "train-00000-of-00002.jsonl", [record()])
    write_lines(home / "train-00001-of-00002.jsonl", [])
    inspect(home).ok().says("train-00001-of-00002.jsonl")
    empty = write_lines(tmp_path / "empty.jsonl", [])
    inspect(empty).fails(1, "empty.jsonl")


def test_invalid_records_of_ones_own_files(inspect: Inspect, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [record(), "{", {"messages": []}, {"question": "x"}, "[1]"]
    )
    shown = inspect(path).fails(1, "a.jsonl:2", "a.jsonl:3", "a.jsonl:4", "skip_bad_records")
    assert "a.jsonl:1" not in shown.text.replace("a.jsonl:1:", "")
    inspect(path, skip_bad_records=True).ok().says(
        "1 conversation", "4 invalid records skipped", "a.jsonl:2"
    )


def test_invalid_records_of_public_data_are_skipped(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharegpt = [
        {
            "id": "x",
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        },
        {"id": "y", "conversations": []},
    ]
    (tmp_path / "sharegpt.json").write_text(json.dumps(sharegpt))
    monkeypatch.setenv("MEDUSA_SEED_DIR", str(tmp_path))
    inspect({"path": "sharegpt"}, chat_template="zephyr").ok().says(
        "1 conversation", "1 invalid records skipped"
    )


def test_a_name_of_the_hub_without_a_network(inspect: Inspect) -> None:
    inspect({"path": "owner/no_such_data"}).fails(1, "owner/no_such_data")


# Records: what is read of a chat

Q, A = "one", "two"
CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "messages": (record(), {}),
    "messages as JSON text": ({"messages": json.dumps(chat(Q, A))}, {}),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]},
        {},
    ),
    "sharegpt with other roles": (
        {"conversations": [{"from": "user", "value": Q}, {"from": "Bard", "value": A}]},
        {},
    ),
    "an answer before the first question": (
        {
            "conversations": [
                {"from": "gpt", "value": "earlier"},
                {"from": "human", "value": Q},
                {"from": "gpt", "value": A},
            ]
        },
        {},
    ),
    "conversation": ({"conversation": chat(Q, A)}, {}),
    "conversations with roles": ({"conversations": chat(Q, A)}, {}),
    "alpaca": ({"instruction": Q, "input": "", "output": A}, {}),
    "a list of turns alone": (chat(Q, A), {}),
    "roles in capitals": (
        {"messages": [{"role": "USER", "content": Q}, {"role": "Model", "content": A}]},
        {},
    ),
    "text parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "o"}, {"text": "ne"}]},
                {"role": "assistant", "content": A},
            ]
        },
        {},
    ),
    "a question after the last answer": ({"messages": chat(Q, A, "three")}, {}),
    "weight 1": (
        {
            "messages": [
                {"role": "user", "content": Q},
                {"role": "assistant", "content": A, "weight": 1},
            ]
        },
        {},
    ),
    "null columns": ({**record(), "conversations": None, "instruction": None}, {}),
    "fields by name": (
        {"talk": [{"who": "customer", "said": Q}, {"who": "agent", "said": A}]},
        {
            "field_messages": "talk",
            "message_property_mappings": {"role": "who", "content": "said"},
            "roles": {"user": ["customer"], "assistant": ["agent"]},
        },
    ),
    "fields by older names": (
        {"talk": [{"who": "user", "said": Q}, {"who": "assistant", "said": A}]},
        {"field_messages": "talk", "message_field_role": "who", "message_field_content": "said"},
    ),
    "a given type": ({**record(), "instruction": "x", "output": "y"}, {"type": "messages"}),
}


@pytest.mark.parametrize("name", CHATS)
def test_records_of_every_format_are_the_same_chat(
    name: str, model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    given, keys = CHATS[name]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([given]))
    (row,) = encode(base_model=str(model), datasets=[{"path": str(path), **keys}], sequence_len=256)
    expected = document(chat(Q, A), tokenizer)
    assert row == (expected.tokens, expected.supervised)


def test_system_messages_inputs_and_reasoning_of_records(
    model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    records: list[tuple[Any, list[dict[str, str]]]] = [
        ({**record(), "system": "S"}, chat(Q, A, system="S")),
        ({"messages": chat(Q, A, system="T"), "system": "S"}, chat(Q, A, system="T")),
        ({**record(), "system": ""}, chat(Q, A)),
        (
            {"messages": [{"role": "developer", "content": "S"}, *chat(Q, A)]},
            chat(Q, A, system="S"),
        ),
        (
            {"instruction": "I", "input": "J", "output": A, "system": "S"},
            chat("I\n\nJ", A, system="S"),
        ),
        (
            {"messages": [*chat(Q), {"role": "assistant", "content": A, "reasoning_content": "R"}]},
            chat(Q, "<think>\nR\n</think>\n\ntwo"),
        ),
        (
            {"messages": [*chat(Q), {"role": "assistant", "content": A, "reasoning": "\nR\n"}]},
            chat(Q, "<think>\nR\n</think>\n\ntwo"),
        ),
    ]
    for number, (given, messages) in enumerate(records):
        path = write_lines(tmp_path / f"{number}.jsonl", [given])
        (row,) = encode(base_model=str(model), datasets=[{"path": str(path)}], sequence_len=256)
        expected = document(messages, tokenizer)
        assert row == (expected.tokens, expected.supervised), given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": [*chat(Q), {"role": "tool", "content": "x"}]}, "tool"),
        ({"messages": [*chat(Q), {"role": "assistant", "content": A, "tool_calls": [{}]}]}, "tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}, "not text"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "critic"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": chat(Q, "  ")}, "turn 2"),
        (
            {"messages": chat(Q, A) + chat(A)[::-1] + [{"role": "assistant", "content": A}] * 2},
            "turn",
        ),
        ({"messages": [{"role": "assistant", "content": A}, *chat(Q, A)]}, "turn 1"),
        ({"messages": [*chat(Q), {"role": "assistant", "content": A, "weight": 0.5}]}, "weight"),
        (
            {
                "messages": [
                    *chat(Q),
                    {"role": "assistant", "content": A, "train": True, "weight": 0},
                ]
            },
            "contradict",
        ),
        (
            {"messages": [*chat(Q), {"role": "assistant", "content": A, "train_detail": []}]},
            "parts",
        ),
        ({"messages": [*chat(Q), {"role": "assistant", "content": A, "train": "yes"}]}, "train"),
        ({**record(), "chat_template_kwargs": {"nope": 1}}, "nope"),
        ({"instruction": Q, "output": A, "history": [["a", "b"]]}, "history"),
        ({"text": "raw"}, "text"),
        ({"prompt": "x"}, "medusa-selfdistill"),
        ('{"messages": [], "messages": []}', "messages"),
        ("3", "object"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
    ],
)
def test_records_that_are_refused(given: Any, words: str, inspect: Inspect, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [record(), given])
    inspect(path).fails(1, "a.jsonl:2", words)


def test_what_a_record_carries_beside_is_named_with_its_count(
    inspect: Inspect, tmp_path: Path
) -> None:
    messages = chat(Q, A)
    messages[0]["name"] = "Ann"
    messages[1]["content"] = [{"type": "text", "text": A, "cache_control": {}}]  # type: ignore[assignment]
    path = write_lines(
        tmp_path / "a.jsonl",
        [{**record(), "id": "7", "score": 3, "source": "x"}, {"messages": messages, "score": 1}],
    )
    inspect(path).ok().says(
        "not read: columns score (2), source (1)",
        "keys of turns content.cache_control (1), name (1)",
    )
    other = write_lines(tmp_path / "b.jsonl", [{**record(), "tools": [{"name": "f"}]}])
    inspect(other).ok().says("tools (1)")
    more = write_lines(tmp_path / "c.jsonl", [{"messages": chat(Q, A, "three")}])
    inspect(more).ok().says("user after the last answer (1)")


def test_what_selfdistillation_writes_is_known(own: Path, inspect: Inspect) -> None:
    assert "not read" not in inspect(own).ok().text


# Prompts and questions

PROMPTS: dict[str, tuple[Any, list[str], str | None]] = {
    "messages": ({"messages": chat(Q, A, "three", system="S")}, [Q, "three"], "S"),
    "turns": ({"question_id": 3, "turns": [Q, "three"]}, [Q, "three"], None),
    "prompt": ({"prompt": Q}, [Q], None),
    "a list of texts": ({"question": [Q, "three"]}, [Q, "three"], None),
    "a list of messages": ({"prompt": chat(Q, system="S")}, [Q], "S"),
    "instruction and input": ({"instruction": "I", "input": "J", "output": "x"}, ["I\n\nJ"], None),
    "problem": ({"problem": Q, "answer": "7"}, [Q], None),
    "a batch file's request": (
        {"custom_id": "r-1", "method": "POST", "url": "/v1", "body": {"messages": chat(Q)}},
        [Q],
        None,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_every_format(name: str, model: Path, tmp_path: Path) -> None:
    given, turns, system = PROMPTS[name]
    path = write_lines(tmp_path / "p.jsonl", [given])
    words = ["--prompts", path, "--model", model, "--output", tmp_path / "o.jsonl"]
    keys = {"temperature": 0, "dtype": "float32", "max_new_tokens": 4}
    selfdistill(*words, **keys, drop_truncated=False, drop_looping=False).ok()
    (written,) = read_lines(tmp_path / "o.jsonl")
    said = [m["content"] for m in written["messages"] if m["role"] == "user"]
    assert said == turns
    if system is not None:
        assert written["messages"][0] == {"role": "system", "content": system}
    identified = given.get("question_id", given.get("custom_id"))
    if identified is not None:
        assert written["id"] == str(identified)


def test_what_prompts_carry_beside_is_named(model: Path, tmp_path: Path) -> None:
    records = [
        {"messages": chat(Q, A), "score": 1},
        {"messages": [{"role": "critic", "content": "x"}, *chat(Q + Q)]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": chat("three"), "tools": [{}]},
    ]
    path = write_lines(tmp_path / "p.jsonl", records)
    out = tmp_path / "o.jsonl"
    keys = {"temperature": 0, "max_new_tokens": 2, "drop_truncated": False}
    shown = selfdistill("--prompts", path, "--model", model, "--output", out, **keys).ok()
    shown.says(
        "columns score (1)",
        "the role critic (1)",
        "records without a message of the user (1)",
        "dropped turns: refused │ 1",  # tools, which the chat template does not render
    )
    assert len(read_lines(out)) == 2


def test_chats_as_a_bench(model: Path, tmp_path: Path) -> None:
    records = [
        {"id": "a", **record()},
        {"id": "b", "messages": chat("three", A, "four", system="S")},
    ]
    path = write_lines(tmp_path / "bench.jsonl", records)
    evaluate(
        "--bench", path, "--base-model", model, dtype="float32", max_new_tokens=3, warmup=0,
        exactness=False, generate=False, prompt_lookup=False, output_dir=tmp_path / "out",
    ).ok()  # fmt: skip
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    assert [(line["question_id"], line["turn"], line["asked"]) for line in lines] == [
        (1, 1, Q),
        (2, 1, "three"),
        (2, 2, "four"),
    ]


def test_other_columns_of_a_question_file_are_named(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "b.jsonl", [{"question_id": 1, "turns": [Q], "level": 3}])
    keys = {"dtype": "float32", "max_new_tokens": 3, "output_dir": tmp_path / "out"}
    evaluate("--bench", path, "--base-model", model, **keys).ok().says("columns level (1)")


def test_a_training_configuration_is_no_prompt(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"base_model: {model}\ndatasets: [{{path: data.jsonl}}]\n")
    found = selfdistill(path)
    assert found.code == 2
    found.says("medusa-selfdistill --prompts", "data.jsonl")


# Where answers end


def with_files(model: Path, where: Path, **contents: Any) -> Path:
    """Copy a model, with other content of JSON files; None removes one."""
    where.mkdir()
    for path in model.iterdir():
        (where / path.name).write_bytes(path.read_bytes())
    for name, content in contents.items():
        path = where / f"{name}.json"
        if content is None:
            path.unlink()
        else:
            old = read_json(path) if path.exists() and isinstance(content, dict) else {}
            path.write_text(
                json.dumps({**old, **content} if isinstance(content, dict) else content)
            )
    return where


@pytest.mark.parametrize(
    ("contents", "ends"),
    [
        ({"generation_config": {"eos_token_id": [9, 12]}}, [1, 9, 12]),
        ({"generation_config": None, "config": {"eos_token_id": 15}}, [1, 15]),
        ({"generation_config": {"eos_token_id": 9}, "config": {"eos_token_id": 15}}, [1, 9]),
        ({"tokenizer_config": {"eos_token": "<|user|>"}}, [1, 2]),
    ],
    ids=["generation_config", "config", "the first of both", "tokenizer"],
)
def test_tokens_that_end_answers(
    contents: dict[str, Any], ends: list[int], model: Path, tmp_path: Path
) -> None:
    base = with_files(model, tmp_path / "model", **contents)
    path = write_lines(tmp_path / "b.jsonl", [{"question_id": 1, "turns": [Q]}])
    keys = {"dtype": "float32", "max_new_tokens": 3, "output_dir": tmp_path / "out"}
    shown = evaluate("--bench", path, "--base-model", base, **keys, generate=False).ok()
    meta = read_json(tmp_path / "out" / "report.json")["meta"]
    assert sorted(meta["stop_tokens"]) == ends
    if ends != [1]:
        shown.says("answers end")


def test_a_generation_config_that_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    base = with_files(model, tmp_path / "model", generation_config=[1])
    path = write_lines(tmp_path / "b.jsonl", [{"question_id": 1, "turns": [Q]}])
    evaluate("--bench", path, "--base-model", base).fails(1, "generation_config.json")


def test_special_tokens_of_a_configuration(model: Path, chats: Path, tmp_path: Path) -> None:
    keys = training_keys(model, chats, tmp_path / "run")
    train(**keys, special_tokens={"eos_token": "<nope>"}).fails(2, "<nope>")
    train(**keys, special_tokens={"cls_token": "<s>"}).fails(2, "cls_token")
    train(**keys, special_tokens={"pad_token": "<nope>"}).ok().says("pad_token")
    assert metrics(tmp_path / "run")


# Heads and weights, run directories


def test_links_in_place_of_parts_of_a_run(model: Path, chats: Path, tmp_path: Path) -> None:
    keys = training_keys(model, chats, tmp_path / "run")
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    train(**keys).ok()
    assert (tmp_path / "disk" / "step-2").is_dir()
    train(**keys, overwrite_output_dir=True).ok()
    assert (tmp_path / "run" / "checkpoints").is_symlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "heads").symlink_to(tmp_path / "nowhere")
    found = train(**keys | {"output_dir": tmp_path / "other"})
    assert found.code in (1, 2)
    found.says("heads")


def test_a_tree_whose_json_says_something_twice_is_refused(
    skilled: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"medusa_choices": [[0]], "medusa_choices": [[1]]}')
    bench = write_lines(tmp_path / "b.jsonl", [{"question_id": 1, "turns": [Q]}])
    evaluate("--bench", bench, "--model", skilled("medusa"), "--tree", path).fails(
        1, "tree.json", "medusa_choices"
    )


def test_a_runs_own_file_grants_no_code(model: Path, chats: Path, tmp_path: Path) -> None:
    train(**training_keys(model, chats, tmp_path / "run"), trust_remote_code=True).ok()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text() + "\n")
    shown = train(config, output_dir=tmp_path / "again").ok()
    shown.says("ignored", "trust_remote_code")
    printed = train(config, "--print-config").ok()
    assert "trust_remote_code: false" in printed.out


def test_an_unfinished_export_is_written_over(
    skilled: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".unfinished-export").touch()
    export(skilled("medusa"), "--to", "vllm", "--output-dir", out).ok()
    assert (out / "model.safetensors").is_file()
    assert not (out / ".unfinished-export").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    found = export(skilled("medusa"), "--to", "vllm", "--output-dir", tmp_path / "full")
    assert (tmp_path / "full" / "mine.txt").read_text() == "x"
    assert found.code in (0, 1, 2)
